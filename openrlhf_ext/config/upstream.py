"""OpenRLHF 0.11.2 and we: the configuration as its classes read it, where defaults differ, earlier
names of options.

Releases before 0.11 wrote ``--pretrain``; 0.11.0 and 0.11.1 wrote
``--algo.advantage.is_correction_enable``. The parser of 0.11.2 knows neither. Sources:
``openrlhf/cli/train_ppo_ray.py`` and ``examples/scripts`` of both times. Which of its options are
refused, and why, stands beside the option (``not_yet``, ``no_meaning`` in the sections).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from openrlhf_ext.config.run_config import RunConfig, option_table
from openrlhf_ext.options import info_of, leaf_fields, nest, value_of, value_text
from openrlhf_ext.options.table import from_words


def upstream_args(config: RunConfig) -> SimpleNamespace:
    """The nested namespace that OpenRLHF 0.11.2's classes read: every option of its parser, after
    its fix-ups.

    Its classes read the model-parallel factor as ``ds.ring_attn_size * ds.tensor_parallel_size``:
    the first carries the context-parallel size, the second tensor * pipeline. The importance
    correction is always "on", because that is what makes the samples generator record the engine's
    log-probs; whether a correction is applied is the estimator's business
    (``RunConfig.algorithm_options``), as are the overlong penalty and the clipping of rewards.
    ``algo.advantage.estimator`` keeps our name: only its experience maker, which is not used, reads
    it.
    """
    flat = {
        name: value_of(config, name)
        for name, field in leaf_fields(type(config))
        if not info_of(field).added
    }
    for side in ("actor", "critic"):  # one destination of two flags
        flat[f"{side}.muon.nesterov"] = flat[f"{side}.muon.nesterov"] and not flat.pop(
            f"{side}.muon.no_nesterov"
        )
    return namespace(nest(flat | _fixed_up(config)))


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
        "rollout.vllm_generate_batch_size": config.rollout.vllm_generate_batch_size
        or config.rollout.batch_size,
        "vllm.sync_backend": "nccl"
        if config.vllm.sync_backend == "auto"
        else config.vllm.sync_backend,
    }


def _reward_urls(config: RunConfig) -> list[str] | None:
    if config.train.agent_func_path is not None:
        return ["agent"]
    return config.reward.remote_url.split(",") if config.reward.remote_url is not None else None


def namespace(tree: Any) -> Any:
    if isinstance(tree, dict):
        return SimpleNamespace(**{name: namespace(branch) for name, branch in tree.items()})
    return tree


# ---- defaults and names


@dataclass(frozen=True)
class Difference:
    """An option whose default or choices cannot be OpenRLHF's here."""

    name: str
    upstream: str
    ours: str
    why: str


DIFFERENCES = (
    Difference(
        "algo.advantage.estimator",
        "gae (and six others)",
        "gae (and others)",
        "methods that OpenRLHF does not have",
    ),
    Difference(
        "algo.kl.init_coef",
        "0.01",
        "0.01 with OpenRLHF's estimators, else 0",
        "the papers of the other methods have no penalty",
    ),
    Difference("vllm.num_engines", "none", "1", "rollouts always come from vLLM"),
    Difference(
        "vllm.sync_backend",
        "nccl",
        "auto (gloo, nccl, cuda_ipc)",
        "the same file must run on GPU and CPU",
    ),
    Difference(
        "vllm.gpu_memory_utilization",
        "0.95",
        "0.95; 0.8 with train.colocate_all",
        "a policy that shares the GPU keeps its CUDA context, NCCL buffers and staging there",
    ),
    Difference(
        "reward.clip_range",
        "-10 10",
        "-10 10 with OpenRLHF's estimators",
        "other methods do not clip rewards",
    ),
    Difference(
        "eval.split",
        "train",
        "validation, test, ... if there is one",
        "training data is not held out",
    ),
    Difference(
        "ds.packing_samples", "false", "true", "micro-batches are always packed without padding"
    ),
    Difference(
        "actor.lr_scheduler",
        "any of transformers' schedules",
        "five of them",
        "the schedule is Megatron's",
    ),
    Difference(
        "critic.lr_scheduler",
        "any of transformers' schedules",
        "five of them",
        "the schedule is Megatron's",
    ),
)

# ---- earlier names

# earlier name -> present name, where the dots do not say it (`present_name`)
RENAMED = {
    # models and where they run
    "pretrain": "actor.model_name_or_path", "critic_pretrain": "critic.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path", "colocate_all_models": "train.colocate_all",
    "ref_reward_offload": "ref.offload", "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    # rewards and agents
    "remote_rm_url": "reward.remote_url", "normalize_reward": "reward.normalize_enable",
    # batches and lengths
    "micro_train_batch_size": "train.micro_batch_size", "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt", "use_dynamic_batch": "train.dynamic_batch_enable",
    "max_new_tokens": "rollout.max_new_tokens", "temperature": "rollout.temperature", "top_p": "rollout.top_p",
    "full_determinism": "train.full_determinism_enable",
    # data
    "prompt_data": "data.prompt_dataset", "prompt_data_probs": "data.prompt_probs",
    # optimizer
    "actor_learning_rate": "actor.adam.lr", "critic_learning_rate": "critic.adam.lr", "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay", "max_norm": "actor.max_norm", "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio", "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "freezing_actor_steps": "critic.freezing_steps",
    # algorithm
    "no_advantage_std_norm": "algo.advantage.no_std_norm", "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss", "entropy_loss_coef": "actor.entropy_coef",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    # engines, precision
    "deepspeed_enable_sleep": "ds.enable_sleep", "param_dtype": "megatron.param_dtype",
    "ring_head_stride": "ds.ring_attn_head_stride",
    # checkpoints and records
    "save_path": "ckpt.output_dir", "save_hf_ckpt": "ckpt.save_hf", "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num", "max_ckpt_mem": "ckpt.max_mem", "load_checkpoint": "ckpt.load_enable",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt", "use_wandb": "logger.wandb.key",
    "use_tensorboard": "logger.tensorboard_dir",
}  # fmt: skip
_ENABLE = (
    "enable_vllm_is_correction",
    "vllm_enable_is_correction",
    "algo.advantage.is_correction_enable",
)
_TYPE = ("vllm_is_correction_type", "algo.advantage.is_correction_type")
_TYPES = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
_THRESHOLD, _LENGTHS = "vllm_is_truncated_threshold", ("prompt_max_len", "generate_max_len")
_NOTHING = ("flash_attn", "perf", "actor_init_on_gpu", "ptx_coef")
_OTHERS = (*_ENABLE, *_TYPE, _THRESHOLD, *_LENGTHS, "use_icepop", "bf16", *_NOTHING)
"""Earlier names that are no present option's: together they say a correction, lengths, or
nothing."""
EARLIER_DEFAULTS = {
    "data.max_len": 2048,
    "train.micro_batch_size": 4,
    "rollout.micro_batch_size": 8,
}
"""Of 0.8 and 0.9, where they differ from ours (``openrlhf/cli/train_ppo_ray.py`` of v0.8.10 and
v0.9.9)."""


STANDS_FOR = {
    "ds.tensor_parallel_size": "megatron.tensor_parallel_size",
    "ds.ring_attn_size": "megatron.context_parallel_size",
    "ds.param_dtype": "megatron.param_dtype",
}
"""Options of DeepSpeed's section, and those that they set here."""


def origin_of(origin: str, name: str) -> str:
    """Where a value comes from that an option of DeepSpeed's section set."""
    return f"{origin}, as {name}"


def stands_in(config: RunConfig, name: str) -> bool:
    """Whether an option has its value from one of DeepSpeed's section."""
    names = [its for its, ours in STANDS_FOR.items() if ours == name]
    return any(config.sources.get(name, "").endswith(origin_of("", its)) for its in names)


def present_name(name: str) -> str | None:
    """What OpenRLHF 0.11.2 calls an option of an earlier release; None if no release had this name.

    Besides the table: ``actor_num_nodes`` is ``actor.num_nodes``, and ``max_epochs`` the one option
    that ends so.
    """
    if name in RENAMED:
        return RENAMED[name]
    if "." in name:
        return None
    spelled = {option.replace(".", "_"): option for option in option_table()}
    same = [option for spelling, option in spelled.items() if spelling == name]
    ends = [option for spelling, option in spelled.items() if spelling.endswith(f"_{name}")]
    return next((found[0] for found in (same, ends) if len(found) == 1), None)


def is_earlier(name: str) -> bool:
    """No option of today, and one of an earlier release."""
    return name in _OTHERS or present_name(name) is not None


def read_earlier(name: str, words: list[str]) -> Any:
    """The value of an option in its earlier name on a command line; UsageError unless the words
    fit."""
    present = {_LENGTHS[0]: "data.max_len", _LENGTHS[1]: "rollout.max_new_tokens"}.get(
        name
    ) or present_name(name)
    if present is not None:
        return from_words(option_table()[present], words)
    if name == _THRESHOLD:
        return words
    return words[0] if words else True


def of_earlier(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options of today that options in earlier names ask for, and what is wrong with them."""
    present = {name: present_name(name) for name in given if name not in _OTHERS}
    values = {today: given[name] for name, today in present.items() if today is not None}
    faults: list[str] = []
    if _is_on(given.get("bf16")):
        values["megatron.param_dtype"] = "bf16"
    if _is_on(given.get("ref_reward_offload")) and "reward_pretrain" in given:
        values["reward.offload"] = True  # one name for both models
    if (coef := _number(given, "ptx_coef", 0.0, faults)) > 0:
        faults.append(
            f"ptx_coef {coef:g} would mix pretraining data into the loss, which is not supported; "
            "set it to 0"
        )
    if any(name in given for name in _LENGTHS):
        prompt, response = (int(_number(given, name, 1024, faults)) for name in _LENGTHS)
        values |= {"data.max_len": prompt + response, "rollout.max_new_tokens": response}
    if any(_is_on(given.get(name)) for name in _ENABLE):
        kind = next((str(given[name]) for name in _TYPE if name in given), "tis")
        kind = "icepop" if _is_on(given.get("use_icepop")) else kind
        if kind not in _TYPES:
            faults.append(
                f"the type of importance correction must be one of {', '.join(_TYPES)}: got {kind}"
            )
        level, mode = _TYPES.get(kind, _TYPES["tis"])
        values |= {
            "algo.advantage.is_correction_level": level,
            "algo.advantage.is_correction_mode": mode,
        }
        if _THRESHOLD in given:
            values["algo.advantage.is_correction_threshold"] = given[_THRESHOLD]
    return values, faults


def _number(given: Mapping[str, Any], name: str, default: float, faults: list[str]) -> float:
    value = given.get(name, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        faults.append(f"{name}: expected a number, got {value_text(value)}")
        return default
    return number


def _is_on(value: Any) -> bool:
    return value is not None and str(value).lower() not in ("false", "0")
