"""The configuration as OpenRLHF 0.11.2's classes read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.options import info_of, leaf_fields, nest, value_of


def upstream_args(config: RunConfig) -> SimpleNamespace:
    """The nested namespace that OpenRLHF 0.11.2's classes read: every option of its parser, after its fix-ups.

    Its classes read the model-parallel factor as ``ds.ring_attn_size * ds.tensor_parallel_size``: the first carries
    the context-parallel size, the second tensor * pipeline. The importance correction is always "on", because that
    is what makes the samples generator record the engine's log-probs; whether a correction is applied is the
    estimator's business (``RunConfig.algorithm_options``), as are the overlong penalty and the clipping of rewards.
    ``algo.advantage.estimator`` keeps our name, which none of its branches knows.
    """
    flat = {name: value_of(config, name) for name, field in leaf_fields(type(config)) if not info_of(field).added}
    for side in ("actor", "critic"):  # one destination of two flags
        flat[f"{side}.muon.nesterov"] = flat[f"{side}.muon.nesterov"] and not flat.pop(f"{side}.muon.no_nesterov")
    return _to_namespace(nest(flat | _fixed_up(config)))


def _fixed_up(config: RunConfig) -> dict[str, Any]:
    layout, clip = config.megatron, config.actor.eps_clip
    return {
        "ds.tensor_parallel_size": layout.tensor_parallel_size * layout.pipeline_parallel_size,
        "ds.ring_attn_size": layout.context_parallel_size,
        "actor.eps_clip_low_high": config.actor.eps_clip_low_high or (clip, clip),
        "actor.gradient_checkpointing_enable": layout.recompute == "full",
        "algo.advantage.is_correction_level": "token",
        "algo.advantage.is_correction_threshold": config.correction_threshold,
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
