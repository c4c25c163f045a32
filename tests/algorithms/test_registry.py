"""A user's own algorithm, in the user's own module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from openrlhf_ext.algorithms import algorithm_names, describe_options, get_algorithm, register_algorithm, registry
from openrlhf_ext.algorithms.baselines import Grpo, GrpoOptions
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
