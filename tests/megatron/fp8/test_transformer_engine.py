"""TransformerEngine's FP8, as far as it can be seen without a GPU: what it is told, and what is
refused."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext.fp8.recipe import BF16Layers, Recipe
from openrlhf_ext.megatron.layers import fp8
from openrlhf_ext.megatron.layers.fp8 import FP8Layers, FP8Unavailable, prove
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.model.build import transformer_config
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.options.sections import Megatron
from tests.models import make_tiny_model

GPU = {
    "is_available": lambda: True,
    "get_device_name": lambda: "H100",
    "get_device_capability": lambda: (9, 0),
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, layers=4)
    return read_model_shape(str(folder))


def config(shape, recipe):
    return transformer_config(
        shape, ParallelLayout(1), torch.bfloat16, Megatron(), (FP8Layers(recipe),)
    )


def test_megatron_takes_the_recipe(shape):
    made = config(shape, Recipe(bf16_layers=BF16Layers(1, 2)))
    assert (made.fp8, made.fp8_recipe, made.fp8_param, made.fp8_dot_product_attention) == (
        "e4m3",
        "blockwise",
        False,
        False,
    )
    assert (
        made.first_last_layers_bf16,
        made.num_layers_at_start_in_bf16,
        made.num_layers_at_end_in_bf16,
    ) == (
        True,
        1,
        2,
    )
    made = config(
        shape,
        Recipe("delayed", "hybrid", margin=1, amax_history_len=7, amax_compute_algo="most_recent"),
    )
    assert (
        made.fp8,
        made.fp8_recipe,
        made.fp8_margin,
        made.fp8_amax_history_len,
        made.fp8_amax_compute_algo,
    ) == (
        "hybrid",
        "delayed",
        1,
        7,
        "most_recent",
    )
    assert not made.tp_only_amax_red and not made.first_last_layers_bf16
    assert config(shape, Recipe("current", "hybrid")).fp8_recipe == "tensorwise"


def test_megatron_is_not_told_of_an_emulation(shape):
    assert config(shape, Recipe(emulate=True)).fp8 is None


def test_both_libraries_leave_the_same_layers_in_bf16(shape):
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    for start, end in [(0, 0), (1, 0), (0, 2), (2, 1)]:
        recipe = Recipe(bf16_layers=BF16Layers(start, end))
        made = config(shape, recipe)
        theirs = [number for number in range(4) if is_first_last_bf16_layer(made, number)]
        assert theirs == recipe.bf16_layers.numbers(4)


def test_the_environment_decides_about_scales():
    assert Recipe().environment["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert Recipe(scales="pow2").environment["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "0"
    assert (
        Recipe("current", scales="pow2").environment["NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"]
        == "1"
    )


def test_without_a_gpu_and_without_the_library_a_rank_refuses_before_it_builds(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(fp8.socket, "gethostname", lambda: "node7")
    make_tiny_model(tmp_path)
    asked = ModelSettings(str(tmp_path), ParallelLayout(1), converters=(FP8Layers(Recipe()),))
    with pytest.raises(FP8Unavailable) as refused:
        MegatronPolicy(asked)
    for words in (
        "node7",
        "there is no GPU",
        "TransformerEngine is not installed",
        "setup_env.sh gpu",
        "fp8.emulate",
    ):
        assert words in str(refused.value)


def refusal(monkeypatch, recipe=None, *, cuda="13.0", found="2.11.0", **gpu) -> str:
    for name, value in (GPU | gpu).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(fp8, "version", lambda name: found)
    with pytest.raises(FP8Unavailable) as refused:
        FP8Layers(recipe or Recipe()).require()
    return str(refused.value)


def test_an_older_gpu_or_cuda_is_named_with_what_is_needed(monkeypatch):
    text = refusal(
        monkeypatch,
        get_device_capability=lambda: (8, 9),
        get_device_name=lambda: "L40S",
        cuda="12.8",
    )
    assert "L40S has compute capability 8.9, fp8.recipe blockwise needs 9.0" in text
    assert "built for CUDA 12.8, fp8.recipe blockwise needs 12.9" in text


def test_another_version_is_refused(monkeypatch):
    assert "TransformerEngine is 2.18.0" in refusal(monkeypatch, found="2.18.0")


@pytest.mark.usefixtures("forgotten")
def test_a_library_that_cannot_be_imported_is_told_with_its_own_words(monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise RuntimeError('Found empty transformer-engine meta package')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = refusal(monkeypatch)
    assert "cannot be imported (RuntimeError: Found empty transformer-engine meta package)" in text


@pytest.fixture
def forgotten():
    """No test sees what another one has imported as transformer_engine."""
    forget()
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("pow2", [False, True])
def test_an_import_that_took_other_scales_is_found(monkeypatch, tmp_path, pow2):
    package = tmp_path / "transformer_engine"
    for name in ("", "pytorch", "common"):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
    (package / "common" / "recipe.py").write_text(
        "class _P:\n    power_2_scale = True\n"
        "class Float8BlockScaling:\n    fp8_quant_fwd_inp = fp8_quant_fwd_weight = _P\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in list(GPU):
        monkeypatch.setattr(torch.cuda, name, GPU[name])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fp8, "version", lambda name: "2.11.0")
    if pow2:
        FP8Layers(Recipe(scales="pow2")).require()
    else:
        with pytest.raises(
            FP8Unavailable,
            match=r"scales that are powers of two, fp8.scales is fp32 .*FP32_SCALES=",
        ):
            FP8Layers(Recipe()).require()


def codes(weight_NK: torch.Tensor, pow2: bool, whole: bool) -> torch.Tensor:
    """E4M3 as TransformerEngine documents it, by torch's own cast: a scale of 448 / amax for all,
    or for 128 x 128."""
    blocks = (
        weight_NK.float().view(1, -1, 1, weight_NK.shape[1])
        if whole
        else weight_NK.float().view(2, 128, 1, 128)
    )
    scale = 448.0 / blocks.abs().amax(dim=(1, 3), keepdim=True)
    scaled = blocks * (torch.exp2(scale.log2().floor()) if pow2 else scale)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(weight_NK.shape)


class TELinear(torch.nn.Linear):
    """What TransformerEngine's layers show after a pass."""

    def __init__(self, recipe: Recipe, spoiled: bool = False) -> None:
        super().__init__(128, 256, bias=False, dtype=torch.bfloat16)
        self.fp8 = True
        made = codes(self.weight.detach(), recipe.pow2, whole=not recipe.blockwise)
        kept = made ^ 1 if spoiled else made
        self._fp8_workspaces = {"weight": SimpleNamespace(_rowwise_data=kept, _data=kept)}


def decoder(layer: torch.nn.Module) -> torch.nn.Module:
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList([torch.nn.Module()])
    made.layers[0].mlp, made.layers[0].self_attention = torch.nn.Module(), torch.nn.Module()
    made.layers[0].mlp.linear_fc1 = layer
    return made


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(scales="pow2"), Recipe("current", "hybrid")])
def test_the_codes_of_a_weight_are_read_back(recipe):
    prove(decoder(TELinear(recipe)), recipe, 0, 1)
    with pytest.raises(
        FP8Unavailable,
        match=r"layers\.0\.mlp\.linear_fc1: 100\.0% of its weight's FP8 codes are not",
    ):
        prove(decoder(TELinear(recipe, spoiled=True)), recipe, 0, 1)


def test_a_layer_that_should_be_bf16_and_is_not_is_found_and_so_is_the_opposite():
    layer, bf16 = TELinear(Recipe()), Recipe(bf16_layers=BF16Layers(1))
    with pytest.raises(FP8Unavailable, match="is a TELinear, which does compute in FP8"):
        prove(decoder(layer), bf16, 0, 2)
    layer.fp8 = False
    prove(decoder(layer), bf16, 0, 2)
    with pytest.raises(FP8Unavailable, match="is a TELinear, which does not compute in FP8"):
        prove(decoder(layer), Recipe(), 0, 2)


def test_attention_outside_of_fp8_is_called_without_it_and_proven(monkeypatch):
    """``fp8.modules mlp``: with a stand-in for TransformerEngine's context, which Megatron has
    entered."""
    inside = [True]

    @contextmanager
    def fp8_autocast(enabled: bool):
        inside.append(enabled)
        yield
        inside.pop()

    class Theirs(TELinear):
        def forward(self, x):
            self.fp8 = inside[-1]
            return super().forward(x)

    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch", SimpleNamespace(fp8_autocast=fp8_autocast)
    )
    recipe = Recipe(modules="mlp")
    layer = SimpleNamespace(
        submodules=SimpleNamespace(
            self_attention=SimpleNamespace(
                submodules=SimpleNamespace(linear_qkv=Theirs, linear_proj=Theirs)
            ),
            mlp=SimpleNamespace(submodules=SimpleNamespace(linear_fc1=Theirs, linear_fc2=Theirs)),
        )
    )
    FP8Layers(recipe).convert(layer, 0, 1)
    made = decoder(layer.submodules.mlp.submodules.linear_fc1(recipe))
    made.layers[
        0
    ].self_attention.linear_qkv = layer.submodules.self_attention.submodules.linear_qkv(recipe)
    for linear in (made.layers[0].mlp.linear_fc1, made.layers[0].self_attention.linear_qkv):
        linear(torch.zeros(1, 128, dtype=torch.bfloat16))
    prove(made, recipe, 0, 1)
    with pytest.raises(
        FP8Unavailable, match="linear_qkv is a Theirs, which does not compute in FP8"
    ):
        prove(made, Recipe(), 0, 1)


def test_a_layer_that_has_kept_nothing_has_not_computed_in_fp8():
    layer = TELinear(Recipe())
    FP8Layers(Recipe()).drop_kept(layer)
    with pytest.raises(FP8Unavailable, match="has kept no FP8 copy of its weight"):
        prove(decoder(layer), Recipe(), 0, 1)
