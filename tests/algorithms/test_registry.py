"""A user's own algorithm, in the user's own module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from openrlhf_ext.algorithms import algorithm_names, describe_options, get_algorithm, register_algorithm, registry
from openrlhf_ext.algorithms.baselines import Grpo, GrpoOptions
from openrlhf_ext.algorithms.registry import algorithm_of_file
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
    with pytest.raises(ValueError, match="'grpo' is already registered by openrlhf_ext.algorithms.baselines.Grpo"):

        @register_algorithm("grpo", GrpoOptions)
        class Other(Grpo):
            pass


# ---- a file of the user's own ----

METHOD = """
from openrlhf_ext.algorithms import register_algorithm
from openrlhf_ext.algorithms.baselines import Grpo, GrpoOptions

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
        ("\n\nraise KeyError('x')", "cannot be imported: line 3: KeyError: 'x'"),
        ("def f(:", "cannot be imported: SyntaxError"),
        (
            "from openrlhf_ext.algorithms import option\noption('float', 1.0, 'x')",
            "line 2: TypeError: option(DEFAULT",
        ),
        (METHOD.format(name="grpo"), "cannot be imported: line 5: ValueError: algorithm 'grpo' is already registered"),
    ],
    ids=["none", "two", "raises", "syntax", "earlier", "taken"],
)
def test_a_file_that_gives_no_algorithm_is_refused(tmp_path, text, problem):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ValueError, match="broken.py") as error:
        algorithm_of_file(str(file))
    assert problem in str(error.value)
