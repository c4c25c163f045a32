"""Checkpoints that are asked for are written, can be chosen, and fit on the disk."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import save_file

from openrlhf_ext.config.file_rules import checkpoint_bytes
from openrlhf_ext.config.files import parameter_count

PARAMETERS = 1000 * 3
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def weights(run_dir):
    save_file({"a": torch.zeros(1000, 2), "b": torch.zeros(1000, dtype=torch.bfloat16), "ids": torch.zeros(9).long()},
              run_dir / "model/model.safetensors")  # fmt: skip
    return run_dir


def test_resumable_checkpoints_need_no_other_option(load):
    assert load("--ckpt.save_steps", "2", "--ckpt.load_enable", "--ckpt.async_enable").warnings == ()


def test_a_run_that_writes_nothing_is_refused(problems):
    (message,) = problems("--ckpt.save_steps", "5", "--ckpt.disable_ds")
    assert message.startswith("ckpt.save_steps 5 writes nothing") and "add --ckpt.save_hf" in message
    assert problems("--ckpt.save_steps", "5", "--ckpt.disable_ds", "--ckpt.save_hf") == []


def test_the_best_checkpoint_needs_a_known_metric_and_evaluations(problems):
    known = ("--eval.dataset", "train.jsonl", "--eval.steps", "2", "--ckpt.best_metric_key")
    assert problems(*known, "eval/accuracy") == []
    assert "must be one of eval/accuracy" in problems(*known, "accuracy")[0]
    assert "set eval.dataset and eval.steps" in problems("--ckpt.best_metric_key", "eval/accuracy")[0]


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("--train.max_restarts", "2"), "a restart begins from the first step"),
        (("--ckpt.fallback_enable",), "neither ckpt.load_enable nor train.max_restarts is set"),
        (("--ckpt.async_enable",), "no resumable checkpoints are written"),
    ],
)
def test_options_without_effect_are_named(load, words, warning):
    (found,) = load(*words).warnings
    assert warning in found
    assert load(*words, "--ckpt.save_steps", "1", "--ckpt.load_enable").warnings == ()


def test_parameters_are_counted_from_the_headers(weights):
    assert parameter_count(str(weights / "model")) == PARAMETERS
    assert parameter_count(str(weights)) is None
    (weights / "model/model.safetensors").write_bytes(b"no header")
    assert parameter_count(str(weights / "model")) is None


@pytest.mark.parametrize(
    ("words", "bytes_each"),
    [
        (("--megatron.param_dtype", "fp32"), 12),
        (("--megatron.param_dtype", "bf16"), 14),
        (("--megatron.param_dtype", "bf16", "--ckpt.save_hf"), 16),
        (("--megatron.param_dtype", "fp32", "--ckpt.save_hf", "--ckpt.disable_ds"), 4),
    ],
)
def test_the_size_of_a_checkpoint(weights, load, words, bytes_each):
    assert checkpoint_bytes(load(*words, "--ckpt.save_steps", "1")) == PARAMETERS * bytes_each


def test_a_disk_without_room_is_found_before_the_run(weights, problems, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**9, 10**9, 40_000))
    (message,) = problems("--ckpt.save_steps", "1", "--megatron.param_dtype", "bf16")
    assert "takes about 42.0 kB" in message and "40.0 kB free" in message and "use another ckpt.path" in message
    assert problems() == [], "a run that saves nothing needs no room"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**9, 10**9, 42_001))
    assert problems("--ckpt.save_steps", "1", "--megatron.param_dtype", "bf16") == []
