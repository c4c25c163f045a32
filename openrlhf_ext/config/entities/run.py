"""The run itself: data, training steps, evaluation, checkpoints, logs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator

from openrlhf_ext.config.entities.base import Entity, Float, Words, not_yet, option

_REWARD_MODEL = {"why": "reward models are not run", "instead": "leave it out"}
_EMA = {"why": "no moving average of the weights is kept", "instead": "leave it out"}
_IMAGES = {"why": "only text models are built", "instead": "leave it out"}


def _interval(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (never) or at least 1")
    return value


Interval = Annotated[int, AfterValidator(_interval), Words("integer >= 1, or -1")]


class Train(Entity):
    """Optimizer steps."""

    colocate_actor_ref: bool = option(
        False, "keep the reference model with the policy's ranks (in their host memory) although ref.num_* is set"
    )
    colocate_critic_reward: bool = not_yet(False, "share GPUs between critic and reward model", **_REWARD_MODEL)
    colocate_all: bool = option(
        False,
        "policy ranks and engine workers share GPUs, one of each on every GPU (docs/modes.md); see ds.enable_sleep and "
        "vllm.enable_sleep",
    )
    max_staleness: int | None = option(
        None,
        "weight versions that a trained token may lag behind the policy; above 0 the engines sample while the policy "
        "trains (docs/modes.md), and algo.advantage.is_correction_level is token unless it is set",
        ge=0,
        default_text="0; train.async_queue_size with train.async_enable",
    )
    late_groups: Literal["train", "drop"] = option(
        "train",
        "what happens to a group that took longer to sample than train.max_staleness allows: it is trained with the "
        "importance correction, or dropped; either way it is counted",
    )
    async_enable: bool = option(
        False, "OpenRLHF's name for train.max_staleness = train.async_queue_size, see train.partial_rollout_enable"
    )
    async_queue_size: int = option(1, "with train.async_enable: train.max_staleness", ge=1)
    partial_rollout_enable: bool = option(
        False,
        "with train.async_enable: replace the engines' weights in the middle of rollouts, which then go on, as "
        "train.max_staleness alone does; without it a weight sync waits for the groups in flight",
    )
    enable_ema: bool = not_yet(False, "keep a moving average of the weights", **_EMA)
    ema_beta: Float = not_yet(0.992, "decay of the moving average", **_EMA)
    dynamic_batch_enable: bool = option(
        False,
        "fill micro-batches up to a token budget (train.max_tokens_per_gpu, rollout.max_tokens_per_gpu) instead of "
        "with a number of samples; either way they are packed without padding",
    )
    max_tokens_per_gpu: int = option(
        16192,
        "with train.dynamic_batch_enable: tokens of a training micro-batch on one rank (context-parallel ranks share a "
        "micro-batch: times megatron.context_parallel_size in all)",
        ge=1,
    )
    num_episodes: int = option(1, "passes over the prompts", ge=1)
    max_epochs: int = option(1, "passes over each batch of rollouts", ge=1)
    micro_batch_size: int = option(
        1, "samples per forward-backward pass and data-parallel rank; see train.dynamic_batch_enable", ge=1
    )
    batch_size: int = option(
        128,
        "samples (not prompts) per optimizer step, over all ranks; whole groups of rollout.n_samples_per_prompt",
        ge=1,
    )
    seed: int = option(42, "seed of data order and sampling", ge=0, le=2**31 - 1)
    full_determinism_enable: bool = option(
        False,
        "give every request to the engines a seed of its own, so that samples do not depend on which engine serves a "
        "prompt and beside which others",
    )
    drift_check: bool = option(
        False,
        "self-test: train with learning rate 0 and fail if a step changes a weight, the policy's log-probs, or what "
        "the engines sample from",
    )
    agent_func_path: str | None = option(
        None, "a .py file that defines AgentExecutor, for multi-turn rollouts with rewards of their own", path="input"
    )
    step_timeout_s: Float = option(1800, "longest time one training step may take, seconds", gt=0)
    max_restarts: int = option(
        0, "how many times a failed run is started again, from its last checkpoint in ckpt.path", ge=0
    )


class Eval(Entity):
    """Evaluation during training."""

    steps: Interval = option(-1, "training steps between evaluations, -1 = never; needs eval.dataset")
    dataset: str | None = option(None, "evaluation prompts; same forms as data.prompt_dataset", path="input")
    split: str = option("train", "split of eval.dataset")
    temperature: Float = option(0.6, "temperature of sampling in evaluation", ge=0)
    n_samples_per_prompt: int = option(4, "responses per prompt in evaluation (pass@n)", ge=1)


class Ckpt(Entity):
    """What is kept on disk."""

    save_steps: Interval = option(
        -1, "training steps between checkpoints that a run can resume from, -1 = none; the last weights are kept anyway"
    )
    path: str = option(
        "./ckpt/checkpoints_ppo_ray", "folder of the checkpoints, on storage that all nodes share", path="output"
    )
    save_hf: bool = option(
        False,
        "write the checkpoints of ckpt.save_steps in Hugging Face form too (weights only)",
    )
    disable_ds: bool = option(False, "write no checkpoints that a run can resume from, only those of ckpt.save_hf")
    max_num: int = option(3, "checkpoints of ckpt.save_steps kept besides the best one; the oldest are deleted", ge=1)
    max_mem: float = option(
        float("inf"),
        "disk space that resumable checkpoints may take, GB (1e9 bytes); the oldest are deleted, never the newest one",
        gt=0,
    )
    load_enable: bool = option(
        False, "resume from the newest checkpoint in ckpt.path; without one the run starts from the beginning"
    )
    fallback_enable: bool = option(
        False, "if the newest checkpoint is damaged, resume from the newest good one instead of stopping"
    )
    async_enable: bool = option(
        False, "write checkpoints while training goes on, from a copy in host memory; one at a time"
    )
    best_metric_key: str = option(
        "",
        "evaluation metric (more is better) whose best checkpoint is kept besides the newest ones, such as "
        "eval/accuracy; empty = none is",
    )
    output_dir: str = option(
        "./ckpt", "folder of the final Hugging Face checkpoint, metrics and figures", path="output"
    )


class Wandb(Entity):
    """Weights and Biases."""

    key: str | None = option(None, "API key; null = no W&B logging", secret=True)
    org: str | None = option(None, "W&B entity")
    group: str | None = option(None, "W&B group")
    project: str = option("openrlhf_train_ppo", "W&B project")
    run_name: str = option(
        lambda: datetime.now().strftime("ppo_%m%dT%H:%M"),
        "name of the run, also of its TensorBoard folder",
        default_text="ppo_<mmddTHH:MM>",
    )


class Logger(Entity):
    """Where numbers go."""

    logging_steps: int = option(1, "training steps between writes to W&B and TensorBoard", ge=1)
    wandb: Wandb = Wandb()
    tensorboard_dir: str | None = option(None, "folder of TensorBoard files; null = none", path="output")
    metrics_path: str | None = option(
        None, "file of metrics, one JSON object per step", path="output", default_text="<ckpt.output_dir>/metrics.jsonl"
    )
    figure_path: str | None = option(
        None,
        "figure (PNG) of reward, accuracy, entropy and length, rewritten as the run goes",
        path="output",
        default_text="<ckpt.output_dir>/training.png",
    )
    peak_tflops: Float | None = option(
        None,
        "TFLOP/s that one device could do, for the MFU; null = dense bf16 of the GPU if it is known and "
        "megatron.param_dtype is bf16, no MFU on CPU",
        gt=0,
    )
    verbose: bool = option(False, "show the logs of Ray and of the libraries")


class Data(Entity):
    """Prompts."""

    disable_fast_tokenizer: bool = option(False, "use the slow tokenizer")
    dataloader_num_workers: int = option(0, "processes that load prompts", ge=0)
    max_len: int = option(2048, "longest sequence, prompt and response together, tokens", ge=2)
    max_samples: int = option(int(1e8), "prompts used of the dataset", ge=1)
    prompt_dataset: str | None = option(
        None,
        "prompts: .jsonl, .json, .csv, .parquet or .arrow file, folder, or hub name; several separated by commas; "
        "required",
        path="input",
    )
    prompt_probs: str | None = option(None, "share of each dataset, separated by commas; null = concatenate")
    prompt_split: str = option("train", "split of data.prompt_dataset")
    input_key: str = option("input", "key of the prompt in a record")
    label_key: str | None = option(None, "key of the reference answer in a record; null = no label")
    input_template: str | None = option(None, "text around the prompt; {} stands for the prompt")
    apply_chat_template: bool = option(False, "put prompts through the tokenizer's chat template")
    image_key: str = not_yet("images", "key of images in a record", **_IMAGES)
    max_images_per_prompt: int = not_yet(0, "images per prompt", **_IMAGES)
    overlong_prompts: Literal["skip", "error"] = option(
        "skip", "prompts that leave no room for rollout.max_new_tokens within data.max_len: count and skip, or stop"
    )
