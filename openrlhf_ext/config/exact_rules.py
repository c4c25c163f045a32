"""What ``train.exact_rollout_enable`` (exact mode) refuses, by name: what was not made or not tried
with the operations that policy and engines share. What the machine decides,
``driver.preflight`` adds to the same report."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.megatron.model.shape import ModelShape
from openrlhf_ext.options import Violation, no_effect, value_of, value_text

# a violation has its options and its words, as in a table

EXACT = "train.exact_rollout_enable"
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTARY = ("default", "llama3")
_USUAL = {
    "embedding_factor": 1.0,
    "residual_factor": 1.0,
    "logits_divisor": 1.0,
    "attention_scale": None,
}
_ADAPTERS = "policy and engines do not compute adapters with the same operations"
_OTHER_OPERATIONS = {
    "fp8.enable": "the engines' products are not the policy's in FP8",
    "fp8.rollout_enable": "the policy's products are not the engines' in FP8",
    "ds.lora.rank": _ADAPTERS,
    "ds.lora.path": _ADAPTERS,
}
# a sum of two numbers is the same in either order, one of more is not
_MOST_RANKS = 2


def layout(config: RunConfig) -> Iterator[Violation]:
    """Policy and engines sum over the same ranks, in the same order."""
    if not config.train.exact_rollout_enable:
        return
    megatron, engine = config.megatron, config.vllm.tensor_parallel_size
    size, of_engine = "megatron.tensor_parallel_size", "vllm.tensor_parallel_size"
    if megatron.context_parallel_size > 1:
        yield _not_with(
            "megatron.context_parallel_size",
            megatron.context_parallel_size,
            "pieces of a sequence would be summed in another order than in the engines",
            "leave megatron.context_parallel_size out",
        )
    if megatron.sequence_parallel_enable:
        yield _not_with(
            "megatron.sequence_parallel_enable",
            "true",
            "sums would be scattered over the ranks, and the engines' are not",
            "leave megatron.sequence_parallel_enable out",
        )
    if megatron.tensor_parallel_size != engine:
        yield Violation(
            (size, of_engine, EXACT),
            f"{size} must equal {of_engine} with {EXACT}, because sums over other ranks round "
            f"otherwise: got {megatron.tensor_parallel_size} and {engine}; make them equal",
        )
    for name, ranks in ((size, megatron.tensor_parallel_size), (of_engine, engine)):
        if ranks > _MOST_RANKS:
            yield Violation(
                (name, EXACT),
                f"{name} must be at most {_MOST_RANKS} with {EXACT}, until the sums are in rank "
                f"order on both sides: got {ranks}; use 1 or 2",
            )


def settings(config: RunConfig) -> Iterator[Violation]:
    """Policy and engines have one type, and the engines sample from what the policy trains."""
    if not config.train.exact_rollout_enable:
        return
    for name, why in _OTHER_OPERATIONS.items():
        if value := value_of(config, name):
            yield _not_with(name, value_text(value), why, f"leave {name} out")
    if (method := config.vllm.speculative.method) != "none":
        why = "a step that checks drafts has more rows than one without"
        yield _not_with("vllm.speculative.method", method, why, "leave it out")
    replay, level = config.train.routing_replay, "algo.advantage.is_correction_level"
    if replay != "off":
        why = "it is for mixtures of experts, which exact mode does not take"
        yield _not_with("train.routing_replay", replay, why, "leave it out")
    if config.rollout_dtype != config.megatron.param_dtype:
        yield Violation(
            ("vllm.dtype", "megatron.param_dtype", EXACT),
            f"vllm.dtype must be megatron.param_dtype with {EXACT}: got {config.rollout_dtype} "
            f"and {config.megatron.param_dtype}; leave vllm.dtype out",
        )
    if config.rollout.top_p < 1:
        why = "log-probs of a truncated distribution are not the policy's"
        yield _not_with("rollout.top_p", f"{config.rollout.top_p:g}", why, "use rollout.top_p 1")
    # not its resolved default, which is of another option that is refused
    if level in config.sources and config.correction_level != "off" and not config.max_staleness:
        why = "there is nothing to correct"
        yield _not_with(level, config.correction_level, why, f"leave {level} out")


def model(config: RunConfig, shape: ModelShape, option: str) -> Iterator[Violation]:
    """The policy's model consists of operations that were tried. Others of the run compute as they
    always do."""
    if config.train.exact_rollout_enable and (untried := list(_untried(shape))):
        yield Violation(
            (option, EXACT),
            f"{EXACT} supports dense models of model_type {', '.join(_FAMILIES)} with rope_type "
            f"{' or '.join(_ROTARY)}: the model of {option} has {', '.join(untried)}; "
            f"use another model, or leave {EXACT} out",
        )


def _untried(shape: ModelShape) -> Iterator[str]:
    rotary = shape.rotary
    if shape.is_mixture:
        yield "a mixture of experts"
    if shape.model_type not in _FAMILIES:
        yield f"model_type {shape.model_type}"
    if rotary["rope_type"] not in _ROTARY:
        yield f"rope_type {rotary['rope_type']}"
    if "partial_rotary_factor" in rotary:
        yield f"partial_rotary_factor {rotary['partial_rotary_factor']:g}"
    if shape.layers_without_rope:
        yield f"{len(shape.layers_without_rope)} layers without rotary embedding"
    for name, usual in _USUAL.items():
        if (value := getattr(shape, name)) != usual:
            yield f"{name} {value:g}"


def unused(config: RunConfig) -> Iterator[str]:
    """What exact mode does not read, and what it means for tokens that lag."""
    tolerance = config.weight_sync.probe_tolerance
    if not config.train.exact_rollout_enable:
        return
    if tolerance is not None:
        yield no_effect("weight_sync.probe_tolerance", tolerance, f"{EXACT} compares bits")
    if config.max_staleness and config.ratios_to_engines and config.algo.old_logprobs == "auto":
        yield (
            f"{EXACT} with train.max_staleness {config.max_staleness}: ratios are to the weights "
            "that sampled a token, and there is no importance correction (algo.old_logprobs "
            "policy has one); rollout/bit_equal counts only tokens that do not lag"
        )


def _not_with(name: str, value: object, why: str, remedy: str) -> Violation:
    return Violation((name, EXACT), f"{EXACT} does not work with {name} {value}: {why}; {remedy}")
