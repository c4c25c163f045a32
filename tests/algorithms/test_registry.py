"""A user's own algorithm, in the user's own module."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.input_tables import attributes, tables
from openrlhf_ext.algorithms import (
    Inputs,
    LossBatch,
    RolloutBatch,
    algorithm_names,
    describe_options,
    get_algorithm,
    methods,
    option,
    register_algorithm,
    registry,
)
from openrlhf_ext.algorithms.groups import Groups, Partition
from openrlhf_ext.algorithms.methods.grpo import Grpo, GrpoOptions
from openrlhf_ext.algorithms.option_blocks import (
    NoOption,
    Options,
    PartitionOptions,
    TruncationOptions,
)
from openrlhf_ext.algorithms.registry import algorithm_of_file, with_published_values
from openrlhf_ext.algorithms.trial import try_algorithm
from openrlhf_ext.checkpoints.files import plain_copy
from openrlhf_ext.user_code import told
from tests.algorithms.helpers import random_groups, to_batch
from tests.algorithms.test_batch import simple_batch

MODULE = '''
from openrlhf_ext.algorithms import Inputs, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.option_blocks import (
    ClipOptions, Degenerate, PartitionOptions, ScopeOptions, TruncationOptions, degenerate
)


class SignOptions(PartitionOptions, TruncationOptions, ClipOptions, ScopeOptions):
    strength: float = option(1.0, "advantage of a success")
    degenerate: Degenerate = degenerate("zero")


@register_algorithm("reward_sign", SignOptions)
class RewardSign(TokenAlgorithm):
    """+strength on successes, -strength on failures."""

    def advantages(self, inputs: Inputs):
        sign_B = inputs.part.success_B.double() - inputs.part.failure_B.double()
        return {"advantages": inputs.segments.spread((self.options.strength * sign_B).float())}
'''


def test_a_users_module_adds_an_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    (tmp_path / "my_algorithms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_algorithms")
    assert "reward_sign" in algorithm_names()
    assert "strength" in {info.name for info in describe_options("reward_sign")}
    algorithm = get_algorithm("reward_sign", strength=0.5, correction={"level": "off"})
    batch = simple_batch()
    shaped = algorithm.shape(batch)
    assert shaped.advantages[::4].tolist() == [0.5, -0.5, 0.5, -0.5]
    new = batch.old_logprobs.clone().requires_grad_()
    algorithm.loss(new, shaped).value.backward()
    assert torch.allclose(new.grad, -shaped.advantages / 16)
    with pytest.raises(ValueError, match="did you mean 'strength'"):
        get_algorithm("reward_sign", strenght=1.0)
    importlib.reload(module)
    sys.modules.pop("my_algorithms")


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="'grpo' is already registered by openrlhf_ext.algorithms.methods.grpo.Grpo",
    ):

        @register_algorithm("grpo", GrpoOptions)
        class Other(Grpo):
            pass


def test_a_method_of_the_package_has_the_name_of_its_file() -> None:
    own = {
        name
        for name, cls in registry._ALGORITHMS.items()
        if cls.__module__.startswith(registry.METHODS)
    }
    assert own == {module.name for module in pkgutil.iter_modules(methods.__path__)}
    elsewhere = type("Elsewhere", (Grpo,), {"__module__": "openrlhf_ext.algorithms.methods.grpo2"})
    with pytest.raises(ValueError, match="'grpo3' must be in methods/grpo3.py, not in grpo2.py"):
        register_algorithm("grpo3", GrpoOptions)(elsewhere)


# ---- a file of the user's own ----

METHOD = """
from openrlhf_ext.algorithms import register_algorithm
from openrlhf_ext.algorithms.methods.grpo import Grpo, GrpoOptions

@register_algorithm("{name}", GrpoOptions)
class Negated(Grpo):
    def advantages(self, inputs):
        fields = super().advantages(inputs)
        return fields | {{"advantages": -fields["advantages"]}}
"""


def test_its_file_is_run_once_and_gives_its_name(tmp_path):
    file = tmp_path / "negated.py"
    file.write_text(METHOD.format(name="own_negated"))
    assert algorithm_of_file(str(file)) == algorithm_of_file(str(file)) == "own_negated"
    batch, _, _ = to_batch(random_groups(0))
    ours, grpo = (get_algorithm(name).shape(batch).advantages for name in ("own_negated", "grpo"))
    assert torch.equal(ours, -grpo) and grpo.abs().sum() > 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must register one algorithm with register_algorithm, got none"),
        (METHOD.format(name="own_one") + METHOD.format(name="own_two"), "got own_one, own_two"),
        ("\n\nraise KeyError('x')", "line 3, in <module>\n    raise KeyError('x')\nKeyError: 'x'"),
        ("def f(:", "line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax"),
        (
            "from openrlhf_ext.algorithms import option\noption('float', 1.0, 'x')",
            "line 2, in <module>\n    option('float', 1.0, 'x')\nTypeError: option() takes 2 "
            "positional arguments",
        ),
        (METHOD.format(name="grpo"), "ValueError: algorithm 'grpo' is already registered"),
    ],
    ids=["none", "two", "raises", "syntax", "arguments", "taken"],
)
def test_a_file_that_gives_no_algorithm_is_refused(tmp_path, text, problem):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ValueError, match="broken.py") as error:
        algorithm_of_file(str(file))
    assert problem in str(error.value)


OWN = """
from openrlhf_ext.algorithms import TokenAlgorithm, register_algorithm
from openrlhf_ext.algorithms.methods.grpo import GrpoOptions
@register_algorithm("{name}", GrpoOptions)
class Own(TokenAlgorithm):
    def advantages(self, inputs):
        return {result}
"""


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            "inputs.rewards",
            r"no attribute 'rewards' \(did you mean batch.rewards\?\); it has .*batch, groups, "
            r"part",
        ),
        (
            "inputs.batch.reward",
            r"'reward' \(did you mean rewards\?\); it has tokens, lengths, rewards",
        ),
        (
            "{'advantages': inputs.batch.rewards}",
            r"advantages must have shape \(N,\) = \(\d+,\), one for each token",
        ),
        (
            "{'advantage': inputs.batch.old_logprobs}",
            r"'advantages' is missing, got 'advantage'; 'advantage' is no "
            r"field of LossBatch \(did you mean 'advantages'\?\)",
        ),
        ("inputs.batch.old_logprobs", r"must be a dict with the key 'advantages', got a Tensor"),
        (
            "{'advantages': inputs.batch.rewards.sum()}",
            r"advantages must have shape \(N,\) = \(\d+,\).*got \(\)",
        ),
        ("{'advantages': [1.0]}", r"must be a tensor of shape \(N,\) = \(\d+,\).*got a list"),
        (
            "{'advantages': inputs.batch.old_logprobs, 'exposed': {'x': "
            "inputs.part.success_B[:1]}}",
            r"exposed\['x'\] must have shape \(B,\) = \(\d+,\), one for each completion or \(N,\)",
        ),
        (
            "{'advantages': inputs.segments.spread(inputs.groups.lengths_B / 0.0)}",
            r"advantages has inf or NaN, first in a group whose rewards are [-0-9.]+, ",
        ),
    ],
)
def test_what_advantages_return_is_checked_by_name(tmp_path, monkeypatch, result, says):
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    file = tmp_path / "own.py"
    file.write_text(OWN.format(name="own_checked", result=result))
    batch, _, _ = to_batch(random_groups(0))
    with pytest.raises((ValueError, AttributeError), match=says) as error:
        get_algorithm(algorithm_of_file(str(file))).shape(batch)
    line = f'File "{file}", line 7, in advantages\n    return {result}'
    assert line in told(error.value) or f"({file}, line 6) returned" in str(error.value)


@pytest.mark.parametrize("size", [1, 4])
def test_every_method_passes_the_trial_of_a_users_own(size):
    for name in ("grpo", "dapo", "gspo", "gtpo_conflict", "clip_cov", "gae", "grpo_s"):
        said = try_algorithm(
            get_algorithm(name, **with_published_values(name, {}, max_length=8), warn=False), size
        )
        assert said.startswith(f"3 made groups of {size}: advantages "), name


class PerShare(Grpo):
    """Its loss counts what a share holds."""

    def loss(self, new_logprobs, shaped):
        found = super().loss(new_logprobs, shaped)
        return dataclasses.replace(found, value=found.value / len(shaped))


class Equal(Grpo):
    """Divides by the spread of a group's rewards."""

    def advantages(self, inputs):
        groups, rewards_B = inputs.groups, inputs.batch.rewards
        spread_Q = groups.maximum(rewards_B) - groups.minimum(rewards_B)
        return {"advantages": inputs.segments.spread(rewards_B / spread_Q[groups.index_B])}


class InPlace(Grpo):
    """Normalizes the rewards where they are."""

    def advantages(self, inputs):
        inputs.batch.rewards.sub_(0.5)
        return super().advantages(inputs)


class NeedsReference(Grpo):
    """Takes the reference's log-probs for granted."""

    def advantages(self, inputs):
        return {"advantages": inputs.batch.old_logprobs - inputs.batch.ref_logprobs}


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (
            Equal,
            ValueError,
            "advantages has inf or NaN, first in a group whose rewards are 0, 0, 0, 0$",
        ),
        (
            InPlace,
            ValueError,
            r"test_registry.py, line \d+\) changes inputs.batch.rewards in place",
        ),
        (NeedsReference, TypeError, "NoneType"),
    ],
)
def test_what_would_go_wrong_in_a_run_goes_wrong_in_the_trial(kind, error, says):
    with pytest.raises(error, match=says):
        try_algorithm(kind(GrpoOptions()), 4, ["ref_logprobs"])


class Keeps(Grpo):
    """A running mean in `self`."""

    def advantages(self, inputs):
        self.mean = 0.9 * getattr(self, "mean", 0.0) + 0.1 * inputs.batch.rewards.mean()
        return {
            "advantages": inputs.segments.spread(
                (inputs.batch.rewards - self.mean).to(inputs.batch.float_dtype)
            )
        }


class Appends(Grpo):
    """Changes what is in a list, and gives it to checkpoints."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def advantages(self, inputs):
        self.seen.append(float(inputs.batch.rewards.sum()))
        return {
            "advantages": inputs.segments.spread((inputs.batch.rewards - len(self.seen)).float())
        }

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Forgets(Appends):
    def state_dict(self):
        return {}


class OfTheClass(Grpo):
    steps = 0

    def advantages(self, inputs):
        type(self).steps += 1
        return super().advantages(inputs)


_COUNTS = [0]


class OfTheModule(Grpo):
    def advantages(self, inputs):
        _COUNTS[0] += 1
        return super().advantages(inputs)


class InTheLoss(Appends):
    def loss(self, new_logprobs, shaped):
        self.losses = getattr(self, "losses", 0) + 1
        return super().loss(new_logprobs, shaped)


class Caches(Forgets):
    """What is kept makes no difference; advantages are partly random."""

    def advantages(self, inputs):
        self.seen.append(lambda: None)
        noise_B = torch.rand(len(inputs.batch.rewards)) + random.random() + np.random.rand()
        return {"advantages": inputs.segments.spread(noise_B.to(inputs.batch.float_dtype))}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            Keeps,
            r"line \d+\) changes self.mean, which a run that is resumed would begin anew: define "
            r"state_dict",
        ),
        (
            Forgets,
            "changes self.seen.*another instance has other advantages for .*; state_dict has "
            "nothing",
        ),
        (OfTheClass, "changes OfTheClass.steps, .*: keep OfTheClass.steps in self"),
        (
            OfTheModule,
            r"changes tests.algorithms.test_registry._COUNTS, .*: keep .*_COUNTS in self",
        ),
        (
            InTheLoss,
            "InTheLoss.loss or prepare changes self.losses, on a rank's copy of the algorithm",
        ),
        (Appends, None),
        (Caches, None),
    ],
)
def test_what_a_method_keeps_and_no_checkpoint_would_have_fails_the_trial(kind, says, monkeypatch):
    monkeypatch.setattr(kind, "name", kind.__name__)
    before = random.getstate(), torch.get_rng_state()
    if says is None:
        assert "advantages" in try_algorithm(kind(GrpoOptions()), 4)
    else:
        with pytest.raises(ValueError, match=says):
            try_algorithm(kind(GrpoOptions()), 4)
    if kind is not Caches:
        assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_a_state_that_no_checkpoint_holds_is_named():
    class Holds(Appends):
        def state_dict(self):
            return {"seen": object()}

    with pytest.raises(
        TypeError, match=r"state\['seen'\] is a object, which a checkpoint does not hold"
    ):
        try_algorithm(Holds(GrpoOptions()), 4, stored=plain_copy)


def test_a_state_for_a_class_that_takes_none_is_refused():
    with pytest.raises(
        ValueError, match="Keeps defines no load_state_dict, and the checkpoint has mean"
    ):
        Keeps(GrpoOptions()).load_state_dict({"mean": 0.5})


def test_an_option_that_a_class_of_options_lacks_is_named_with_its_place_and_the_remedy():
    class Bare(Options):
        strength: float = option(1.0, "of nothing")

    class Clipped(Bare, PartitionOptions, TruncationOptions):
        pass

    for options, says in (
        (
            Bare(),
            r"Bare \(.*test_registry.py, line \d+\) has no option success_threshold, .*inherit "
            r"PartitionOptions",
        ),
        (
            Clipped(),
            r"Clipped \(.*test_registry.py, line \d+\) has no option degenerate, .* "
            r"degenerate\(DEFAULT\)",
        ),
    ):
        with pytest.raises(NoOption, match=says):
            try_algorithm(Grpo(options), 4)


def test_a_loss_that_does_not_add_up_over_shares_fails_the_trial():
    own = PerShare(GrpoOptions())
    with pytest.raises(
        ValueError,
        match="of two shares must add up to that of their mini-batch.*shaped.denominators",
    ):
        try_algorithm(own, 4)


def test_the_document_lists_what_inputs_and_the_loss_hold():
    written = (Path(__file__).parents[2] / "docs/reference/inputs.md").read_text()
    assert written == "".join(tables()), (
        "put the output of `python benchmarks/input_tables.py` there"
    )
    for holder in (Inputs, RolloutBatch, Groups, Partition, LossBatch):
        listed = {name for name, _ in attributes(holder)}
        assert {field.name for field in dataclasses.fields(holder)} <= listed, (
            "its docstring lists every field"
        )
