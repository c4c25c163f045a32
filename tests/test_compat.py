"""What this package relies on of OpenRLHF 0.11.2: names, signatures, fields. An upgrade shows its drift here."""

# ruff: noqa: E501  (one signature a line)

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest

from openrlhf_ext import compat


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]  # Ray adds that one


def test_the_pinned_version_is_installed():
    assert version("openrlhf") == compat.SUPPORTED_OPENRLHF


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (compat.get_tokenizer, "pretrain model padding_side strategy use_fast"),
    ],
)  # fmt: skip
def test_signatures(function, expected):
    assert parameters(function) == expected.split()


def test_what_agents_are_given():
    assert parameters(compat.AgentExecutorBase.execute) == [
        "self", "prompt", "label", "sampling_params", "max_length", "hf_tokenizer", "llm_engine", "images",
    ]  # fmt: skip


def test_what_the_loggers_are_told():
    for logger in (compat.WandbLogger, compat.TensorboardLogger):
        assert parameters(logger.log_train) == ["self", "global_step", "logs_dict"]
        assert parameters(logger.log_eval) == ["self", "global_step", "logs_dict"]


def test_plain_classes_can_be_subclassed():
    plain = compat.RolloutRayActor
    assert type("Sub", (plain,), {}).__mro__[1] is plain
