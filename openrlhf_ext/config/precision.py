"""FP8 of a run: its rules about settings and models, its warning, and its lines in a dry run."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.fp8.recipe import LayerShape, differing_tensors
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.options import Violation, value_of

# a violation has its options and its words, as in a table

_UNIT, _BLOCK = 16, 128


def parameters(config: TrainedConfig) -> Iterator[Violation]:
    """Beside FP8 products the rest of a model runs in bf16; fp32 is for emulation, where nothing is
    to be saved."""
    if config.fp8.enable and not config.fp8.emulate and config.megatron.param_dtype == "fp32":
        yield Violation(
            ("fp8.enable", "megatron.param_dtype", "fp8.emulate"),
            "fp8.enable needs megatron.param_dtype bf16, because everything except the FP8 "
            "products is computed in it: got fp32; use bf16, or add fp8.emulate",
        )


def determinism(config: RunConfig) -> Iterator[str]:
    """FP8 makes flipped codes of the last bits of a product, which on CPU depend on what else is in
    an engine's batch; on GPUs the run asks for vLLM's batch-invariant kernels."""
    if (
        config.train.full_determinism_enable
        and config.fp8.rollout_enable
        and config.vllm.max_num_seqs != 1
    ):
        yield (
            "train.full_determinism_enable with fp8.rollout_enable: where engines run on CPU, "
            "two runs differ unless vllm.max_num_seqs is 1 (docs/fp8.md)"
        )


def model_violations(option: str, model: ModelShape, config: TrainedConfig) -> Iterator[Violation]:
    """FP8 suits the model of ``option``, where it is asked for."""
    without = ["mixtures of experts"] if model.is_mixture else []
    without += sorted({kind.no_fp8 for kind in model.attention_counts} - {""})
    if not without:
        yield from _layers(option, model, config)
        yield from _widths(option, model, config)
        return
    for name in ("fp8.enable", "fp8.rollout_enable"):
        if value_of(config, name):
            yield Violation(
                (name, option),
                f"{name} is not supported for {' and '.join(without)}, such as the model of "
                f"{option}; leave it out",
            )


def _layers(option: str, model: ModelShape, config: TrainedConfig) -> Iterator[Violation]:
    """FP8 is left with layers, and Megatron takes the others."""
    fp8, megatron = config.fp8, config.megatron
    if not (fp8.enable or fp8.rollout_enable):
        return
    start, end = "fp8.layers_in_bf16_start", "fp8.layers_in_bf16_end"
    left_out = fp8.bf16_layers.start + fp8.bf16_layers.end
    if left_out >= model.num_layers:
        yield Violation(
            (option, start, end),
            f"{start} + {end} must be below the model's layers, or none is left for FP8: got "
            f"{fp8.bf16_layers.start} + {fp8.bf16_layers.end}, the model of {option} has "
            f"{model.num_layers}; lower them, or switch FP8 off",
        )
        return
    if not fp8.enable:
        return
    # megatron-core 0.19.2 transformer_config.py:1411, whatever the virtual stages; emulated for the
    # same runs as TE's
    most = model.num_layers // megatron.pipeline_parallel_size
    for name, count in ((start, fp8.bf16_layers.start), (end, fp8.bf16_layers.end)):
        if count > most:
            yield Violation(
                (option, name, "megatron.pipeline_parallel_size"),
                f"{name} must not exceed the layers of a pipeline stage (a limit of Megatron): "
                f"got {count}, a stage of the model of {option} has {most} on average "
                f"({model.num_layers} layers in {megatron.pipeline_parallel_size} stages); use "
                f"{most} or fewer, or fewer stages",
            )


def _widths(option: str, model: ModelShape, config: TrainedConfig) -> Iterator[Violation]:
    """TransformerEngine's products take the shards of the weights; the emulation cuts any width.

    Its FP8 products want multiples of 16, and blocks of activations that sequence parallelism
    gathers are whole:
    ``Float8BlockQuantizer.is_quantizable`` (float8_blockwise_tensor.py of TransformerEngine 2.11).
    """
    fp8, megatron = config.fp8, config.megatron
    if not fp8.enable or fp8.emulate:
        return
    tp, blocks = (
        megatron.tensor_parallel_size,
        fp8.recipe == "blockwise" and megatron.sequence_parallel_enable,
    )
    unit = _BLOCK if blocks else _UNIT
    broken = {
        what: size for what, size in _shard_widths(model, tp, fp8.modules).items() if size % unit
    }
    if not broken:
        return
    names = ["fp8.enable", option, "megatron.tensor_parallel_size"]
    remedies = ["lower megatron.tensor_parallel_size"] if tp > 1 else []
    if blocks:
        names += ["fp8.recipe", "megatron.sequence_parallel_enable"]
        remedies += ["leave megatron.sequence_parallel_enable out", "use fp8.recipe current"]
    remedy = ", ".join([*remedies, "add fp8.emulate or switch FP8 off"])
    sizes = ", ".join(f"{what} {size:g}" for what, size in broken.items())
    reason = " (fp8.recipe blockwise with megatron.sequence_parallel_enable)" if blocks else ""
    yield Violation(
        tuple(names),
        f"fp8.enable needs weight shards whose dimensions are multiples of {unit}{reason}: the "
        f"model of {option} on megatron.tensor_parallel_size {tp} has {sizes}; {remedy}",
    )


def _shard_widths(model: ModelShape, tp: int, modules: str) -> dict[str, float]:
    """Sides of the weights of a layer that one tensor-parallel rank holds; not whole where another
    rule is broken."""
    heads = model.num_heads * model.head_dim
    mlp = {
        "hidden size": model.hidden_size,
        **{what: size / tp for what, size in model.mlp.divided.items()},
    }
    attention = {
        "rows of q, k and v": (heads + 2 * model.num_kv_heads * model.head_dim) / tp,
        "columns of the output projection": heads / tp,
    }
    return mlp if modules == "mlp" else mlp | attention


def lines(config: RunConfig, model: ModelShape | None) -> Iterator[str]:
    """What is FP8, in training and rollout, and which layers are not."""
    fp8 = config.fp8
    if not (fp8.enable or fp8.rollout_enable):
        return
    training = fp8.training_label.removeprefix("FP8 ") or "off"
    rollout = "blockwise e4m3 fp32" if fp8.rollout_enable else "off"
    yield f"FP8 of the linear layers: training {training}; rollout {rollout}"
    yield f"layers that stay in the model's precision: {_kept(config, model)}"
    recipe = fp8.training_recipe
    if model is not None and fp8.rollout_enable and recipe is not None and recipe.blockwise:
        yield _tiles_line(
            model, config.layout.tensor_parallel_size, config.vllm.tensor_parallel_size
        )


def _tiles_line(model: ModelShape, trainer_tp: int, engine_tp: int) -> str:
    layer = LayerShape(model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_hidden_size)
    names = differing_tensors(layer, trainer_tp, engine_tp)
    if not names:
        return "tiles of the weights: the same in trainer and engines"
    return (
        "tiles of the weights differ between trainer and engines, which then quantize differently: "
        f"{', '.join(names)}"
    )


def _kept(config: RunConfig, model: ModelShape | None) -> str:
    kept = config.fp8.bf16_layers
    if model is None:
        return f"{kept.start} at the start and {kept.end} at the end"
    return " ".join(map(str, kept.numbers(model.num_layers))) or "none"
