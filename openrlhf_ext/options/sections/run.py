"""The run itself: data, training steps, checkpoints, logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from openrlhf_ext.inputs import split_inputs
from openrlhf_ext.options import (
    Float,
    Int,
    Reason,
    Section,
    Violation,
    Words,
    added,
    not_yet,
    option,
    required,
)

_IMAGES: Reason = {"why": "only text models are supported", "instead": "leave it out"}


def _interval(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 (never) or at least 1")
    return value


Interval = Annotated[Int, AfterValidator(_interval), Words("integer >= 1, or -1")]


# an option has its default, its meaning and its bounds, as in a table


CORRIDOR_ABOUT = (
    "file of metric bands from trusted runs of the same recipe, written by openrlhf-ext report "
    "--write_corridor: a step outside them causes a warning with likely causes (docs/faults.md)"
)
CORRIDOR_ACTION_ABOUT = "with train.corridor: warn about a step outside it, or fail = end the run"


class Train(Section):
    """Optimizer steps."""

    needs = {
        "!train.dynamic_batch_enable": ("micro_batch_size",),
        "train.async_enable": ("async_queue_size", "partial_rollout_enable"),
        "train.max_staleness | train.async_enable": ("late_groups",),
        "train.enable_ema": ("ema_beta",),
        "reward.model_name_or_path": ("colocate_critic_reward",),
        "algo.advantage.estimator=gae": ("colocate_critic_reward",),
        "train.rollback_on": ("spike_factor",),
    }

    colocate_actor_ref: bool = option(
        False,
        "keep the reference model with the policy's ranks (in their host memory) even if "
        "ref.num_* is set",
    )
    colocate_critic_reward: bool = option(
        False, "share GPUs between critic and reward model, one rank of each on every GPU"
    )
    colocate_all: bool = option(
        False,
        "policy ranks and engine workers share GPUs, one of each on every GPU, and other models "
        "share the policy's; engines that sample while the policy trains have their own GPUs "
        "(docs/modes.md); see ds.enable_sleep and vllm.enable_sleep",
    )
    max_staleness: Int | None = added(
        None,
        "weight versions that a trained token may lag behind the policy (if more: "
        "train.late_groups); above 0 the engines sample while the policy trains (docs/modes.md), "
        "and algo.advantage.is_correction_level defaults to token",
        ge=0,
        default_text="0; train.async_queue_size with train.async_enable",
    )
    late_groups: Literal["train", "drop", "wait"] = added(
        "train",
        "what happens to a group that takes longer to sample than train.max_staleness allows: "
        "train = train on it with the importance correction, drop = discard it, both counted; "
        "wait = keep batches in the order of their prompts and wait for each batch's last group, "
        "so that none is late",
    )
    async_enable: bool = option(
        False,
        "OpenRLHF's name for train.max_staleness = train.async_queue_size, see "
        "train.partial_rollout_enable",
    )
    async_queue_size: Int = option(1, "with train.async_enable: value of train.max_staleness", ge=1)
    partial_rollout_enable: bool = option(
        False,
        "with train.async_enable: replace the engines' weights during rollouts, which then "
        "continue, as train.max_staleness alone does; without it a weight sync waits for the "
        "groups in flight",
    )
    routing_replay: Literal["off", "rollout", "policy"] = added(
        "off",
        "for mixtures of experts: rollout = old log-probs and training use the experts that the "
        "engine's routers chose for each token, weighted by the current router; policy = training "
        "uses those of the forward pass for old log-probs; off = the policy's routers choose in "
        "every pass (docs/algorithms.md)",
    )
    enable_ema: bool = option(
        False,
        "keep a moving average of the policy's weights (fp32, in host memory: 4 bytes per "
        "parameter of a rank); Hugging Face checkpoints contain the average, the engines sample "
        "from the policy",
    )
    ema_beta: Float = option(
        0.992, "decay of the moving average at each optimizer step", ge=0, lt=1
    )
    dynamic_batch_enable: bool = option(
        False,
        "fill micro-batches up to a token budget (train.max_tokens_per_gpu, "
        "rollout.max_tokens_per_gpu) instead of with a fixed number of samples; both are packed "
        "without padding",
    )
    max_tokens_per_gpu: Int = option(
        16192,
        "with train.dynamic_batch_enable: tokens of a training micro-batch on one rank "
        "(context-parallel ranks share a micro-batch: megatron.context_parallel_size times as "
        "many in total)",
        ge=1,
    )
    num_episodes: Int = option(1, "passes over the prompts", ge=1)
    max_epochs: Int = option(1, "passes over each batch of rollouts", ge=1)
    micro_batch_size: Int = option(
        1,
        "samples per forward-backward pass and data-parallel rank; see train.dynamic_batch_enable",
        ge=1,
        le=2**16,
    )
    batch_size: Int = option(
        128,
        "samples (not prompts) per optimizer step, over all ranks; whole groups of "
        "rollout.n_samples_per_prompt",
        ge=1,
    )
    seed: Int = option(42, "seed of data order and sampling", ge=0, le=2**31 - 1)
    full_determinism_enable: bool = option(
        False,
        "give every request to the engines its own seed, so that samples do not depend on which "
        "engine serves a prompt; on GPUs, also use vLLM's batch-invariant kernels (slower), so "
        "that they do not depend on the other requests in a batch, and only TransformerEngine's "
        "deterministic attention (guarantees: docs/checkpoints.md)",
    )
    exact_rollout_enable: bool = added(
        False,
        "policy and engines compute with the same operations, so that both have the same log-prob "
        "of a sampled token to the last bit; rollout/bit_equal proves it, and the forward pass for "
        "old log-probs falls away (docs/exact.md)",
    )
    drift_check: bool = added(
        False,
        "self-test: train with learning rate 0 and fail if a step changes a weight, the "
        "policy's log-probs, or what the engines sample from",
    )
    agent_func_path: str | None = option(
        None,
        "a .py file that defines run_agent or AgentExecutor, for multi-turn rollouts with their "
        "own rewards",
        path="input",
    )
    step_timeout_s: Float = added(1800, "longest time one training step may take, seconds", gt=0)
    max_minutes: Float | None = added(
        None,
        "training stops after the first step that ends this many minutes after its start, even if "
        "prompts are left; evaluations between steps count, those before the first and after the "
        "last step do not; a resumed run starts counting anew",
        gt=0,
    )
    max_restarts: Int = added(
        0,
        "how many times a failed run is restarted from its last checkpoint in ckpt.path",
        ge=0,
    )
    corridor: str | None = added(None, CORRIDOR_ABOUT, path="input")
    corridor_action: Literal["warn", "fail"] = added("warn", CORRIDOR_ACTION_ABOUT)
    rollback_on: tuple[Literal["nan", "spike"], ...] | None = added(
        None,
        "go back to the last checkpoint and skip the prompts of a step with: nan = a loss or "
        "gradient that is not finite, spike = see train.spike_factor (docs/checkpoints.md); null "
        "= nan ends the run",
    )
    spike_factor: Float = added(
        10.0,
        "a step spikes if its gradient norm before clipping exceeds this many times the median of "
        "the last 20 steps",
        gt=1,
    )

    def violations(self) -> Iterator[Violation]:
        """What the names for streaming ask for is one thing."""
        asked, queue = self.max_staleness, self.async_queue_size
        queue_is_set = "async_queue_size" in self.model_fields_set
        if self.async_enable and asked is not None and queue_is_set and asked != queue:
            yield Violation(
                ("train.max_staleness", "train.async_queue_size"),
                "train.max_staleness and train.async_queue_size are two names for one number: got "
                f"{asked} and {queue}; leave train.async_queue_size out",
            )
        if self.async_enable and asked == 0:
            yield Violation(
                ("train.max_staleness", "train.async_enable"),
                "train.async_enable samples while the policy trains, which train.max_staleness "
                "0 forbids: leave one of them out, or set train.max_staleness to at least 1",
            )


class Saved(Section):
    """What any run keeps on disk."""

    save_steps: Interval = option(
        -1,
        "training steps between resumable checkpoints, -1 = none; the final weights are always "
        "saved",
    )
    path: str = option(
        "./ckpt/checkpoints_ppo_ray",
        "folder of the checkpoints, on storage that all nodes share",
        path="output",
    )
    save_hf: bool = option(
        False, "also write the checkpoints of ckpt.save_steps in Hugging Face format (weights only)"
    )
    disable_ds: bool = option(False, "write no resumable checkpoints, only those of ckpt.save_hf")
    max_num: Int = option(
        3, "checkpoints of ckpt.save_steps kept besides the best ones; the oldest are deleted", ge=1
    )
    max_mem: float = option(
        float("inf"),
        "disk space that resumable checkpoints may take, GB (1e9 bytes); the oldest are "
        "deleted, never the newest one",
        gt=0,
    )
    load_enable: bool = option(
        False,
        "resume from the newest checkpoint in ckpt.path; without one the run starts from the "
        "beginning",
    )
    fallback_enable: bool = added(
        False,
        "if the newest checkpoint is damaged, resume from the newest good one instead of stopping",
    )
    take_over_lock: bool = added(
        False,
        "start even if ckpt.path, ckpt.output_dir or the run folder is locked by a run on another "
        "host; use it when that run has ended",
    )
    output_dir: str = option(
        "./ckpt", "folder of the final Hugging Face checkpoint, metrics and figures", path="output"
    )

    @property
    def saves(self) -> bool:
        """Whether anything is saved before the end of a run."""
        return self.save_steps != -1

    def violations(self) -> Iterator[Violation]:
        """Checkpoints that are asked for are of some form."""
        if self.disable_ds and not self.save_hf and self.save_steps != -1:
            yield Violation(
                ("ckpt.save_steps", "ckpt.disable_ds", "ckpt.save_hf"),
                f"ckpt.save_steps {self.save_steps} writes nothing: ckpt.disable_ds switches "
                "resumable checkpoints off and ckpt.save_hf is off; drop ckpt.disable_ds or add "
                "--ckpt.save_hf",
            )


class Ckpt(Saved):
    """What is kept on disk."""

    needs = {
        "ckpt.save_steps!=-1 | ckpt.best_metric_key": ("save_hf", "max_num", "async_enable"),
        "ckpt.best_metric_key": ("keep_best",),
        "!ckpt.disable_ds": ("async_enable",),
        "ckpt.load_enable | train.max_restarts": ("fallback_enable",),
    }

    async_enable: bool = added(
        False,
        "write checkpoints while training continues, from a copy in host memory; one at a time",
    )
    grace_s: Float = added(
        20,
        "after SIGTERM: seconds for the current step to end and its checkpoint to be written "
        "before the run ends (docs/checkpoints.md); 0 = write no checkpoint",
        ge=0,
    )
    best_metric_key: str = option(
        "",
        "metric (higher is better) whose best checkpoints are kept besides the newest ones: of "
        "evaluations, such as eval/accuracy, eval/score_mean or eval/NAME/pass@8, or of the "
        "training steps that ckpt.save_steps saves, accuracy/mean, score/mean or reward/mean; "
        "empty = none",
    )
    keep_best: Int = added(
        1,
        "checkpoints that ckpt.best_metric_key keeps, the best of all evaluations or saved steps",
        ge=1,
    )

    @property
    def saves(self) -> bool:
        return super().saves or bool(self.best_metric_key)


class Wandb(Section):
    """Weights and Biases."""

    needs = {"logger.wandb.key": ("org", "group", "project")}

    key: str | None = option(None, "API key; null = no W&B logging", secret=True)
    org: str | None = option(None, "W&B entity")
    group: str | None = option(None, "W&B group")
    project: str = option("openrlhf_train_ppo", "W&B project")
    run_name: str = option(
        lambda: datetime.now().strftime("ppo_%m%dT%H:%M"),
        "name of the run, also of its TensorBoard folder",
        default_text="ppo_<mmddTHH:MM>",
    )


class Records(Section):
    """Where metrics go."""

    needs = {"logger.wandb.key | logger.tensorboard_dir": ("logging_steps",)}

    logging_steps: Int = option(1, "training steps between writes to W&B and TensorBoard", ge=1)
    wandb: Wandb = Wandb()
    tensorboard_dir: str | None = option(
        None, "folder of TensorBoard files; null = none", path="output"
    )
    metrics_path: str | None = added(
        None,
        "file of metrics, one JSON object per step",
        path="output",
        default_text="<ckpt.output_dir>/metrics.jsonl",
    )
    figure_path: str | None = added(
        None,
        "figure (PNG) of the training curves, updated during the run",
        path="output",
        default_text="<ckpt.output_dir>/training.png",
    )
    verbose: bool = added(False, "show the logs of Ray and of the libraries")

    def beside(self, name: str) -> Path:
        """A file or folder of the run folder, in which metrics.jsonl is."""
        return Path(required(self.metrics_path, "logger.metrics_path")).with_name(name)


class Logger(Records):
    """Where metrics and completions go."""

    samples_every: Interval | None = added(
        None,
        "training steps between those whose completions are saved in samples.jsonl beside the "
        "metrics (of evaluations: eval_samples.jsonl); the first's always are; -1 = none",
        default_text="a twentieth of the run",
    )
    samples_groups: Int = added(
        2,
        "groups of completions saved per such step, fewer if they are long; 0 = all of them, of "
        "any size. Of evaluations: prompts of each set",
        ge=0,
    )
    peak_tflops: Float | None = added(
        None,
        "peak TFLOP/s of one device, for the MFU; null = dense bf16 peak of the GPU if it is "
        "known and megatron.param_dtype is bf16, no MFU on CPU",
        gt=0,
    )


class Profile(Section):
    """Where the time of single steps goes."""

    needs = {"profile.steps": ("ranks",)}

    steps: str | None = added(
        None,
        "training steps in which policy ranks are profiled, such as 5 or 5-7; writes traces and a "
        "table beside the metrics (docs/report.md); null = none",
    )
    ranks: tuple[Annotated[Int, Field(ge=0)], ...] = added(
        (0,), "policy ranks that are profiled in these steps", min_length=1
    )

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """The steps, both included; None = none."""
        if self.steps is None:
            return None
        first, _, last = self.steps.partition("-")
        return int(first), int(last or first)

    def violations(self) -> Iterator[Violation]:
        """The steps are one, or a range."""
        name = "profile.steps"
        if self.steps is not None and not re.fullmatch(r"[1-9][0-9]*(-[1-9][0-9]*)?", self.steps):
            yield Violation(
                (name,),
                f"{name} must be a step or a range of steps, such as 5 or 5-7: got {self.steps}",
            )
        elif (steps := self.first_and_last) is not None and steps[0] > steps[1]:
            yield Violation(
                (name,), f"{name} must not end before it begins: got {self.steps}; swap the two"
            )


class Texts(Section):
    """Records whose texts are read."""

    disable_fast_tokenizer: bool = option(False, "use the slow tokenizer")
    input_template: str | None = option(None, "text around the prompt; {} stands for the prompt")

    def unreadable(self, datasets: str, shares: str) -> Iterator[Violation]:
        """The template puts the prompt somewhere; there is one share for each dataset, adding up to
        1; both by name."""
        if self.input_template is not None and not holds_prompt(self.input_template):
            yield Violation(
                ("data.input_template",),
                "data.input_template must contain {}, where the prompt goes, and no other field "
                f"(write {{{{ and }}}} for braces), or be null: got {self.input_template!r}",
            )
        paths, numbers = getattr(self, datasets), getattr(self, shares)
        if paths is not None and numbers is not None:
            yield from share_violations(f"data.{shares}", numbers, f"data.{datasets}", paths)

    def cautions(self) -> Iterator[str]:
        if "\\n" in (self.input_template or ""):
            yield (
                "data.input_template contains a backslash and an n, not a line break: write one as "
                "($'\\n' in bash)"
            )


class Data(Texts):
    """Prompts."""

    needs = {"!data.apply_chat_template": ("input_template",)}

    dataloader_num_workers: Int = option(0, "processes that load prompts", ge=0, le=2**8)
    max_len: Int = option(2048, "longest sequence, prompt and response together, tokens", ge=2)
    max_samples: Int = option(
        int(1e8), "prompts used from each dataset, also from those of eval.dataset", ge=1
    )
    prompt_dataset: str | None = option(
        None,
        "prompts: .jsonl, .json, .csv, .parquet or .arrow file, folder, or hub name; several "
        "separated by commas; required",
        path="input",
    )
    prompt_probs: str | None = option(
        None, "shares of the datasets, separated by commas; null = concatenate"
    )
    prompt_split: str = option("train", "split of data.prompt_dataset")
    input_key: str = option("input", "key of the prompt in a record")
    label_key: str | None = option(None, "key of the reference answer in a record; null = no label")
    apply_chat_template: bool = option(False, "apply the tokenizer's chat template to prompts")
    image_key: str = not_yet("images", "key of images in a record", **_IMAGES)
    max_images_per_prompt: Int = not_yet(0, "images per prompt", **_IMAGES)
    overlong_prompts: Literal["skip", "error"] = added(
        "skip",
        "prompts that leave no room for rollout.max_new_tokens within data.max_len: count and "
        "skip, or stop",
    )

    def violations(self) -> Iterator[Violation]:
        yield from self.unreadable("prompt_dataset", "prompt_probs")


def holds_prompt(template: str, marker: str = "<the prompt>") -> bool:
    try:
        return marker in template.format(marker)
    except (LookupError, ValueError, AttributeError, TypeError):
        return False


def share_violations(option: str, shares: str, of: str, datasets: str) -> Iterator[Violation]:
    """There is one share for each dataset of the option ``of``, and they add up to 1."""
    count = len([*split_inputs(datasets)])
    try:
        numbers = [float(share) for share in shares.split(",")]
    except ValueError:
        yield Violation((option,), f"{option} must be numbers separated by commas: got {shares}")
        return
    # false for nan
    if len(numbers) != count or not abs(sum(numbers) - 1) <= 1e-6 or min(numbers) < 0:
        yield Violation(
            (option, of),
            f"{option} must hold one share for each dataset of {of} and add up to 1: got "
            f"{shares} for {count} dataset{'s' if count > 1 else ''}",
        )
