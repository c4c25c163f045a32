"""The run itself: data, training steps, evaluation, checkpoints, logs."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator

from openrlhf_ext.config.entities.base import Entity, Float, Words, no_meaning, not_yet, option

_COLOCATE = {
    "why": "policy and engines do not share GPUs",
    "instead": "leave it out and provide actor.num_nodes * actor.num_gpus_per_node + vllm.num_engines * "
    "vllm.tensor_parallel_size GPUs",
}
_ASYNC = {"why": "training and rollouts take turns", "instead": "leave it out"}
_EMA = {"why": "no moving average of the weights is kept", "instead": "leave it out"}
_DYNAMIC = {
    "why": "micro-batches hold a fixed number of samples",
    "instead": "use train.micro_batch_size and rollout.micro_batch_size",
}
_IMAGES = {"why": "only text models are built", "instead": "leave it out"}


def _interval(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (never) or at least 1")
    return value


Interval = Annotated[int, AfterValidator(_interval), Words("integer >= 1, or -1")]


class Train(Entity):
    """Optimizer steps."""

    colocate_actor_ref: bool = not_yet(False, "share GPUs between policy and reference model", **_COLOCATE)
    colocate_critic_reward: bool = not_yet(False, "share GPUs between critic and reward model", **_COLOCATE)
    colocate_all: bool = not_yet(False, "share GPUs between all models and engines", **_COLOCATE)
    async_enable: bool = not_yet(False, "sample the next batch while training on this one", **_ASYNC)
    async_queue_size: int = not_yet(1, "batches of rollouts waiting for training", **_ASYNC)
    partial_rollout_enable: bool = not_yet(False, "sync weights in the middle of rollouts", **_ASYNC)
    enable_ema: bool = not_yet(False, "keep a moving average of the weights", **_EMA)
    ema_beta: Float = not_yet(0.992, "decay of the moving average", **_EMA)
    dynamic_batch_enable: bool = not_yet(False, "fill micro-batches up to a token budget", **_DYNAMIC)
    max_tokens_per_gpu: int = not_yet(16192, "token budget of a training micro-batch", **_DYNAMIC)
    num_episodes: int = option(1, "passes over the prompts", ge=1)
    max_epochs: int = option(1, "passes over each batch of rollouts", ge=1)
    micro_batch_size: int = option(1, "samples per forward-backward pass and data-parallel rank", ge=1)
    batch_size: int = option(
        128,
        "samples (not prompts) per optimizer step, over all ranks; whole groups of rollout.n_samples_per_prompt",
        ge=1,
    )
    seed: int = option(42, "seed of data order and sampling", ge=0)
    full_determinism_enable: bool = option(
        False,
        "give every request to the engines a seed of its own, so that samples do not depend on which engine serves a "
        "prompt and beside which others",
    )
    agent_func_path: str | None = option(
        None, "a .py file that defines AgentExecutor, for multi-turn rollouts with rewards of their own", path="input"
    )
    step_timeout_s: Float = option(1800, "longest time one training step may take, seconds", gt=0)


class Eval(Entity):
    """Evaluation during training."""

    steps: Interval = option(-1, "training steps between evaluations, -1 = never; needs eval.dataset")
    dataset: str | None = option(None, "evaluation prompts; same forms as data.prompt_dataset", path="input")
    split: str = option("train", "split of eval.dataset")
    temperature: Float = option(0.6, "temperature of sampling in evaluation", ge=0)
    n_samples_per_prompt: int = option(4, "responses per prompt in evaluation (pass@n)", ge=1)


class Ckpt(Entity):
    """What is kept on disk."""

    save_steps: Interval = option(-1, "training steps between checkpoints, -1 = only the final one; needs ckpt.save_hf")
    path: str = option("./ckpt/checkpoints_ppo_ray", "folder of the checkpoints made during training", path="output")
    save_hf: bool = option(
        False,
        "write the checkpoints of ckpt.save_steps, in Hugging Face form (weights only: a run cannot be resumed yet)",
    )
    disable_ds: bool = no_meaning(
        False,
        "write no DeepSpeed checkpoint",
        why="DeepSpeed does not run the policy",
        instead="leave it out",
    )
    max_num: int = option(3, "checkpoints of ckpt.save_steps kept; the oldest are deleted", ge=1)
    max_mem: float = not_yet(
        float("inf"),
        "disk space of all checkpoints, GB",
        why="only their number is limited",
        instead="use ckpt.max_num",
    )
    load_enable: bool = not_yet(
        False,
        "resume from ckpt.path",
        why="a run cannot be resumed",
        instead="start from a Hugging Face checkpoint with actor.model_name_or_path",
    )
    best_metric_key: str = option(
        "",
        "evaluation metric whose best value is kept as a checkpoint of its own, such as eval/accuracy; empty = none is",
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
