"""FP8: what is refused before Ray starts, what is warned about, and what follows for the importance
correction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf_ext.config import format_config, load_config, placement_table
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from tests.config.conftest import MODEL

FP8 = ("--fp8.enable",)
EMULATED = (*FP8, "--fp8.emulate")
DELAYED = (*FP8, "--fp8.recipe", "delayed")
ROLLOUT = ("--fp8.rollout_enable",)
TP2 = ("--megatron.tensor_parallel_size", "2")
PP2 = ("--megatron.pipeline_parallel_size", "2")
SP = ("--megatron.sequence_parallel_enable",)


def write_model(folder: Path, **changes: int) -> None:
    (folder / "model/config.json").write_text(json.dumps(MODEL | changes))


def correction(config) -> dict | None:
    return algorithm_options(config)[2]


# ---- the recipe


@pytest.mark.parametrize(
    "name, form", [("blockwise", "e4m3"), ("current", "hybrid"), ("delayed", "hybrid")]
)
def test_each_recipe_has_its_own_format(load, name, form):
    assert load(*FP8, "--fp8.recipe", name).fp8.training_recipe == Recipe(name, form)
    assert load("--fp8.recipe", name).fp8.training_recipe is None


def test_a_recipe_is_what_the_options_say(load):
    recipe = load(
        *DELAYED,
        "--fp8.format",
        "e4m3",
        "--fp8.margin",
        "1",
        "--fp8.amax_history_len",
        "4",
        "--fp8.amax_compute_algo",
        "most_recent",
    ).fp8.training_recipe
    assert recipe == Recipe(
        "delayed", "e4m3", margin=1, amax_history_len=4, amax_compute_algo="most_recent"
    )
    recipe = load(
        *EMULATED, "--fp8.scales", "pow2", "--fp8.layers_in_bf16_end", "1"
    ).fp8.training_recipe
    assert recipe == Recipe(scales="pow2", bf16_layers=BF16Layers(0, 1), emulate=True)


# ---- refused


def test_fp32_parameters_are_emulated_only(problems):
    assert problems(*FP8) == problems(*EMULATED, "--megatron.param_dtype", "fp32") == []
    assert problems(*ROLLOUT, "--megatron.param_dtype", "fp32") == []
    (message,) = problems(*FP8, "--megatron.param_dtype", "fp32")
    assert (
        message.startswith("fp8.enable needs megatron.param_dtype bf16")
        and "add fp8.emulate" in message
    )


@pytest.mark.parametrize("emulate", [(), ("--fp8.emulate",)])
def test_delayed_scaling_leaves_no_layers_in_bf16(problems, emulate):
    assert problems(*DELAYED, *emulate) == []
    (message,) = problems(
        *DELAYED, *emulate, "--fp8.layers_in_bf16_start", "1", "--fp8.layers_in_bf16_end", "2"
    )
    assert "got fp8.layers_in_bf16_start 1 and fp8.layers_in_bf16_end 2" in message
    assert "use fp8.recipe blockwise or current" in message


def test_mlps_only_are_the_policys_not_the_engines(problems, load, run_dir):
    only = ("--fp8.modules", "mlp")
    assert load(*FP8, *only).fp8.training_recipe == Recipe(modules="mlp")
    (message,) = problems(*FP8, *ROLLOUT, *only)
    assert (
        "fp8.modules mlp needs engines without FP8" in message and "use fp8.modules all" in message
    )
    assert problems(*FP8, "--fp8.modules", "attention"), "there is no such choice"
    write_model(run_dir, num_key_value_heads=1, head_dim=36)
    assert problems(*FP8, *TP2) != [] and problems(*FP8, *TP2, *only) == [], (
        "attention may have any width"
    )


@pytest.mark.parametrize("side", ["start", "end"])
def test_bf16_layers_fit_into_a_pipeline_stage(problems, side):
    name = f"fp8.layers_in_bf16_{side}"
    assert problems(*FP8, f"--{name}", "3") == []
    assert problems(*FP8, *PP2, f"--{name}", "2") == []
    (message,) = problems(*FP8, *PP2, f"--{name}", "3")
    assert (
        message.startswith(f"{name} must not exceed the layers of a pipeline stage")
        and "got 3, a stage" in message
    )
    assert problems(*ROLLOUT, *PP2, f"--{name}", "3") == [], (
        "the limit is Megatron's, not the engines'"
    )
    # Megatron counts the layers of the stage, however many chunks they are in
    assert problems(*FP8, *PP2, f"--{name}", "2", "--megatron.virtual_pipeline_size", "2") == []


@pytest.mark.parametrize("which", [FP8, ROLLOUT])
def test_a_layer_is_left_for_fp8(problems, which):
    assert (
        problems(*which, "--fp8.layers_in_bf16_start", "2", "--fp8.layers_in_bf16_end", "1") == []
    )
    (message,) = problems(
        *which, "--fp8.layers_in_bf16_start", "2", "--fp8.layers_in_bf16_end", "2"
    )
    assert (
        "or none is left for FP8: got 2 + 2, the model of actor.model_name_or_path has 4" in message
    )


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"hidden_size": 264, "head_dim": 32}, "hidden size 264"),
        ({"intermediate_size": 528}, "MLP width 264"),
        ({"head_dim": 6}, "columns of the output projection 24"),
        ({"num_key_value_heads": 1, "head_dim": 36}, "rows of q, k and v 180"),
    ],
)
def test_products_take_multiples_of_16(problems, run_dir, changes, what):
    write_model(run_dir, **changes)
    assert problems(*EMULATED, *TP2) == problems(*ROLLOUT, *TP2) == []
    (message,) = problems(*FP8, *TP2)
    assert "multiples of 16: " in message and "lower megatron.tensor_parallel_size" in message
    assert f"on megatron.tensor_parallel_size 2 has {what}; " in message


def test_blocks_that_sequence_parallelism_gathers_are_whole(problems, run_dir):
    assert problems(*FP8, *TP2, *SP) == []
    write_model(run_dir, intermediate_size=288)
    assert problems(*FP8, *TP2) == problems(*FP8, *TP2, *SP, "--fp8.recipe", "current") == []
    assert problems(*EMULATED, *TP2, *SP) == []
    (message,) = problems(*FP8, *TP2, *SP)
    assert (
        "multiples of 128 (fp8.recipe blockwise with megatron.sequence_parallel_enable)" in message
    )
    assert (
        "has MLP width 144; " in message
        and "leave megatron.sequence_parallel_enable out" in message
    )


@pytest.mark.parametrize(
    "leaf, value, recipe",
    [
        ("margin", "1", "blockwise"),
        ("amax_history_len", "4", "current"),
        ("amax_compute_algo", "max", "blockwise"),
        ("scales", "fp32", "delayed"),
    ],
)
def test_options_of_another_recipe_are_refused(problems, leaf, value, recipe):
    (message,) = problems(*FP8, "--fp8.recipe", recipe, f"--fp8.{leaf}", value)
    assert message.startswith(f"fp8.{leaf} applies only to fp8.recipe ")
    assert f"got {value} and fp8.recipe {recipe}" in message


# ---- warned about


def test_options_without_fp8_have_no_effect(load):
    words = (
        "--fp8.emulate",
        "--fp8.recipe",
        "current",
        "--fp8.format",
        "e4m3",
        "--fp8.scales",
        "pow2",
        "--fp8.margin",
        "1",
        "--fp8.amax_history_len",
        "4",
        "--fp8.amax_compute_algo",
        "max",
        "--fp8.modules",
        "mlp",
    )
    for first in ((), ROLLOUT):
        warnings = load(*first, *words).warnings
        assert len(warnings) == 8
        assert all(
            " has no effect: got " in w and "and fp8.enable is off; set fp8.enable" in w
            for w in warnings
        )
    layers = ("--fp8.layers_in_bf16_start", "1", "--fp8.layers_in_bf16_end", "1")
    assert load(*ROLLOUT, *layers).warnings == load(*FP8, *layers).warnings == ()
    one, other = load(*layers).warnings
    assert (
        "fp8.enable is off and fp8.rollout_enable is off" in one and "layers_in_bf16_end" in other
    )


def test_a_scale_of_a_whole_tensor_makes_noise(load):
    assert load(*FP8).warnings == ()
    for name in ("current", "delayed"):
        (warning,) = load(*FP8, "--fp8.recipe", name).warnings
        assert (
            f"fp8.recipe {name}: " in warning
            and "a log-prob depends on the other sequences in its pack" in warning
        )


def test_two_quantizers_that_differ_are_told(load):
    assert load(*FP8, *ROLLOUT).warnings == ()
    assert load(*FP8, *ROLLOUT, "--fp8.format", "hybrid").warnings == (), (
        "the forward pass is the engines'"
    )
    (warning,) = load(*FP8, *ROLLOUT, "--fp8.scales", "pow2").warnings
    assert (
        "fp8.recipe blockwise and fp8.scales pow2" in warning and "two quantizers add up" in warning
    )
    _, warning = load(*FP8, *ROLLOUT, "--fp8.recipe", "current").warnings
    assert "fp8.recipe current and fp8.scales fp32" in warning


# ---- importance correction


def test_runs_that_should_be_equal_are_told_of_the_batch(load):
    words = [*ROLLOUT, "--train.full_determinism_enable"]
    (warning,) = load(*words).warnings
    assert "two runs differ unless vllm.max_num_seqs is 1" in warning
    assert (
        load(*words, "--vllm.max_num_seqs", "1").warnings
        == load("--train.full_determinism_enable").warnings
        == ()
    )


def test_fp8_engines_are_corrected_for_unless_the_run_says_otherwise(load):
    level, mode, threshold = (
        f"--algo.advantage.is_correction_{leaf}" for leaf in ("level", "mode", "threshold")
    )
    clipped = {"level": "token", "mode": "clip", "gating": "ratio", "threshold": [0.0, 2.0]}
    masked = {"level": "token", "mode": "mask", "gating": "ratio", "threshold": [0.5, 5.0]}
    assert correction(load(*FP8)) is None
    assert correction(load(*ROLLOUT)) == correction(load(*ROLLOUT, level, "token")) == clipped
    assert correction(load(*ROLLOUT, "--train.async_enable")) == clipped
    assert correction(load(*ROLLOUT, level, "off")) is None
    assert correction(load(*ROLLOUT, mode, "mask")) == masked
    assert correction(load(*ROLLOUT, threshold, "3")) == clipped | {"threshold": [0.0, 3.0]}
    assert correction(load(*ROLLOUT, level, "seq")) == masked | {"level": "seq"}
    divergence = ("--algo.advantage.is_correction_gating", "tv", threshold, "0.1")
    assert correction(load(*ROLLOUT, *divergence)) == masked | {
        "gating": "tv",
        "threshold": [0.0, 0.1],
    }


@pytest.mark.parametrize(
    "words", [ROLLOUT, ("--train.async_enable",), (*ROLLOUT, "--train.async_enable")]
)
def test_the_correction_is_shown_and_loads_back(load, run_dir, words):
    config = load(*words)
    text = format_config(config)
    assert 'is_correction_level: "token"' in text
    assert ("is_correction_threshold: [0.0, 2.0]" in text) == (words[0] == ROLLOUT[0])
    (run_dir / "saved.yaml").write_text(text)
    again = load_config(["--config", "saved.yaml"])
    assert again.model_dump() == config.model_dump() and correction(again) == correction(config)


# ---- the dry run


def test_the_placement_says_what_is_fp8(load):
    assert "FP8" not in placement_table(load())
    layers = ("--fp8.layers_in_bf16_start", "1", "--fp8.layers_in_bf16_end", "2")
    text = placement_table(load(*EMULATED, *ROLLOUT, *layers))
    assert (
        "FP8 of the linear layers: training blockwise e4m3 fp32, EMULATED; rollout blockwise "
        "e4m3 fp32\n" in text
    )
    assert "layers that stay in the model's precision: 0 2 3\n" in text
    text = placement_table(load(*ROLLOUT))
    assert "training off; rollout blockwise e4m3 fp32" in text and "model's precision: none" in text
    assert "training delayed hybrid fp32; rollout off" in placement_table(load(*DELAYED))
    hub = placement_table(load(*FP8, *layers, "--actor.model_name_or_path", "org/name"))
    assert "model's precision: 1 at the start and 2 at the end" in hub


def test_the_placement_names_tensors_that_are_cut_into_different_tiles(load, run_dir):
    assert "tiles" not in placement_table(load(*FP8)) + placement_table(load(*ROLLOUT))
    assert "tiles" not in placement_table(load(*FP8, *ROLLOUT, "--fp8.recipe", "current")), (
        "tensors have one scale"
    )
    # heads of 32 entries, interleaved by group in the trainer
    text = placement_table(load(*EMULATED, *ROLLOUT, *TP2))
    (line,) = (line for line in text.splitlines() if "tiles of the weights differ" in line)
    assert "model.layers.*.self_attn.q_proj.weight" in line and "mlp" not in line
    write_model(run_dir, head_dim=128)
    text = placement_table(load(*EMULATED, *ROLLOUT, *TP2, "--vllm.tensor_parallel_size", "2"))
    assert "tiles of the weights: the same in trainer and engines" in text
