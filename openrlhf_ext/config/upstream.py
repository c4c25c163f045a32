"""The bridge to OpenRLHF 0.11.2: which options are its own, where ours differ, and the namespace its classes read."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openrlhf_ext.config.access import leaf_fields, nest, value_of
from openrlhf_ext.config.algorithm_options import correction_threshold

if TYPE_CHECKING:
    from openrlhf_ext.config.schema import RunConfig

_OUR_ENTITIES = ("critic.megatron.", "megatron.", "weight_sync.")
_OUR_OPTIONS = frozenset(
    {
        "ckpt.async_enable",
        "ckpt.fallback_enable",
        "data.overlong_prompts",
        "dry_run",
        "logger.figure_path",
        "logger.metrics_path",
        "logger.peak_tflops",
        "logger.verbose",
        "reward.failure_value",
        "reward.max_failures",
        "reward.num_workers",
        "reward.timeout_s",
        "rollout.max_filter_batches",
        "rollout.timeout_s",
        "train.late_groups",
        "train.max_restarts",
        "train.max_staleness",
        "train.drift_check",
        "train.step_timeout_s",
        "vllm.dtype",
        "vllm.hang_timeout_s",
        "vllm.kv_cache_mib",
        "vllm.max_num_batched_tokens",
        "vllm.max_num_seqs",
        "vllm.max_requests",
        "vllm.max_restarts",
        "vllm.start_timeout_s",
    }
)


@dataclass(frozen=True)
class Difference:
    """An option whose default or choices are not OpenRLHF's, because OpenRLHF's cannot work here."""

    name: str
    upstream: str
    ours: str
    why: str


DIFFERENCES = (
    Difference(
        "algo.advantage.estimator",
        "gae (and six others)",
        "grpo (and twelve others)",
        "the estimators are those of openrlhf_ext.algorithms",
    ),
    Difference("algo.kl.init_coef", "0.01", "0.0", "a reference model is loaded only when asked for"),
    Difference("vllm.num_engines", "none", "1", "rollouts always come from vLLM"),
    Difference("vllm.sync_backend", "nccl", "auto (gloo, nccl, cuda_ipc)", "the same file must run on GPU and CPU"),
    Difference("reward.clip_range", "-10 10", "null", "rewards enter the estimator as they are graded"),
    Difference("ds.packing_samples", "false", "true", "micro-batches are always packed without padding"),
    Difference("actor.lr_scheduler", "any of transformers", "five of them", "the schedule is Megatron's"),
    Difference("critic.lr_scheduler", "any of transformers", "five of them", "the schedule is Megatron's"),
)


def is_ours(name: str) -> bool:
    """Whether an option is an extension, that is, unknown to OpenRLHF."""
    is_method = name.startswith("algo.") and name.count(".") == 1 and not name.startswith("algo.dynamic_")
    return name in _OUR_OPTIONS or name.startswith(_OUR_ENTITIES) or is_method


def upstream_namespace(config: RunConfig) -> SimpleNamespace:
    """Every option of OpenRLHF's parser, nested, after the fix-ups that its main program applies.

    Its classes read the model-parallel factor as ``ds.ring_attn_size * ds.tensor_parallel_size``: the first carries the
    context-parallel size, the second tensor * pipeline. The importance correction is always "on", because that is what
    makes the samples generator record the engine's log-probs; whether a correction is applied is the estimator's
    business (:meth:`RunConfig.algorithm_options`), as are the overlong penalty and the clipping of rewards.
    ``algo.advantage.estimator`` keeps our name, which none of its branches knows.
    """
    flat = {name: value_of(config, name) for name, _ in leaf_fields(type(config)) if not is_ours(name)}
    for side in ("actor", "critic"):  # one destination of two flags
        flat[f"{side}.muon.nesterov"] = flat[f"{side}.muon.nesterov"] and not flat.pop(f"{side}.muon.no_nesterov")
    return _to_namespace(nest(flat | _fixed_up(config)))


def _fixed_up(config: RunConfig) -> dict[str, Any]:
    layout = config.megatron
    return {
        "ds.tensor_parallel_size": layout.tensor_parallel_size * layout.pipeline_parallel_size,
        "ds.ring_attn_size": layout.context_parallel_size,
        "actor.eps_clip_low_high": config.actor.eps_clip_low_high or (config.actor.eps_clip, config.actor.eps_clip),
        "actor.gradient_checkpointing_enable": layout.recompute == "full",
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_threshold": correction_threshold(config.algo.advantage.is_correction_threshold),
        "critic.model_name_or_path": None,
        "reward.remote_url": _reward_urls(config),
        "reward.overlong_buffer_len": None,
        "reward.clip_range": (float("-inf"), float("inf")),
        "train.dynamic_batch_enable": False,  # the ranks pack their own shards
        "rollout.vllm_generate_batch_size": config.rollout.vllm_generate_batch_size or config.rollout.batch_size,
        "vllm.sync_backend": "nccl" if config.vllm.sync_backend == "auto" else config.vllm.sync_backend,
    }


def _reward_urls(config: RunConfig) -> list[str] | None:
    if config.train.agent_func_path is not None:
        return ["agent"]
    return config.reward.remote_url.split(",") if config.reward.remote_url is not None else None


def _to_namespace(tree: Any) -> Any:
    if isinstance(tree, dict):
        return SimpleNamespace(**{name: _to_namespace(branch) for name, branch in tree.items()})
    return tree
