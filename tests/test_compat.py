"""What this package relies on of OpenRLHF 0.11.2: names, signatures, fields. An upgrade shows its
drift here."""

# ruff: noqa: E501  (one signature a line)

from __future__ import annotations

import inspect
import json
from importlib.metadata import version

import pytest

from openrlhf_ext import compat
from tests.models import make_tiny_policy


def parameters(function) -> list[str]:
    # Ray adds that one
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def test_the_pinned_version_is_installed():
    assert version("openrlhf") == "0.11.2"


@pytest.mark.parametrize("tokenizer_class", ["Qwen2Tokenizer", "Evil", None])
def test_a_tokenizers_own_code_is_not_executed(tmp_path, tokenizer_class):
    make_tiny_policy(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    told = {
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        "tokenizer_class": tokenizer_class,
    }
    settings.write_text(json.dumps(json.loads(settings.read_text()) | told))
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: pass\n"
    )
    tokenizer = compat.get_tokenizer(str(tmp_path), "right")
    assert (
        tokenizer.padding_side == "right"
        and tokenizer.pad_token is not None
        and tokenizer("1+2")["input_ids"]
    )
    assert not (tmp_path / "executed").exists()


def test_what_agents_are_given():
    assert parameters(compat.AgentExecutorBase.execute) == [
        "self",
        "prompt",
        "label",
        "sampling_params",
        "max_length",
        "hf_tokenizer",
        "llm_engine",
        "images",
    ]


def test_what_the_loggers_are_told():
    for logger in (compat.WandbLogger, compat.TensorboardLogger):
        assert parameters(logger.log_train) == ["self", "global_step", "logs_dict"]
        assert parameters(logger.log_eval) == ["self", "global_step", "logs_dict"]


def test_plain_classes_can_be_subclassed():
    plain = compat.RolloutRayActor
    assert type("Sub", (plain,), {}).__mro__[1] is plain
