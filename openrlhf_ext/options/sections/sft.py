"""Sections of supervised fine-tuning, where OpenRLHF's ``train_sft`` has others than
``train_ppo_ray``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Literal

from openrlhf_ext.options import Float, Int, Section, Violation, added, no_meaning, option
from openrlhf_ext.options.sections.models import Adam, DeepSpeedTraining, TrainedModel
from openrlhf_ext.options.sections.run import (
    CORRIDOR_ABOUT,
    CORRIDOR_ACTION_ABOUT,
    Interval,
    Records,
    Saved,
    Texts,
    Wandb,
)

# an option has its default, its meaning and its bounds, as in a table


class Model(TrainedModel):
    """The model being trained."""

    num_gpus_per_node: Int | None = added(
        None,
        "ranks that the command starts on this machine, one per GPU, or one per process on CPU; "
        "torchrun and other launchers, which start the command once per rank, set it themselves",
        ge=1,
        le=2**8,
        default_text="the number of GPUs of this machine, 1 without GPUs",
    )
    pretrain_mode_enable: bool = option(
        False,
        "train on every token of data.input_key as it is: continued pretraining, without template "
        "or answers",
    )


class SupervisedData(Texts):
    """Examples: prompts with answers, or chats."""

    needs = {
        "data.apply_chat_template": ("tokenizer_chat_template",),
        "!data.apply_chat_template": ("input_template",),
        "!model.pretrain_mode_enable": (
            "output_key",
            "apply_chat_template",
            "tokenizer_chat_template",
            "multiturn",
            "input_template",
        ),
    }

    dataset: str | None = option(
        None,
        "examples: .jsonl, .json, .csv, .parquet or .arrow file, folder, or hub name; several "
        "separated by commas; required",
        path="input",
    )
    dataset_probs: str | None = option(
        None, "shares of the datasets, separated by commas; null = concatenate"
    )
    dataset_split: str = option("train", "split of data.dataset")
    max_samples: Int = option(
        1000000, "examples used from each dataset, also from those of eval.dataset", ge=1
    )
    max_len: Int = option(
        2048,
        "longest example, prompt and answer together, tokens: longer ones are cut, and examples "
        "whose prompt leaves no room for an answer are skipped; see data.cut_answers",
        ge=4,
    )
    input_key: str = option(
        "input",
        "key of the prompt in a record; with data.apply_chat_template it may be a list of "
        "messages; without data.output_key that list is the whole chat, and its last message is "
        "the answer",
    )
    output_key: str | None = option(None, "key of the answer in a record")
    input_template: str | None = option(
        "User: {}\nAssistant: ",
        "text around the prompt, unless data.apply_chat_template is on; {} stands for the "
        "prompt; null = none",
        default_text="User: {}\\nAssistant: ",
    )
    apply_chat_template: bool = option(False, "apply the tokenizer's chat template to examples")
    cut_answers: Literal["open", "end"] = added(
        "open",
        "answers that data.max_len cuts: open = train on what is left; end = also replace the "
        "last token by the end token, as OpenRLHF does",
    )
    tokenizer_chat_template: str | None = option(
        None, "chat template instead of the tokenizer's own"
    )
    multiturn: bool = option(
        False, "train on every assistant message of a chat instead of only the last one"
    )
    dataloader_num_workers: Int = no_meaning(
        0,
        "processes that load examples",
        why="examples are tokenized once, before the first step",
        instead="leave it out",
    )

    def violations(self) -> Iterator[Violation]:
        yield from self.unreadable("dataset", "dataset_probs")
        if self.multiturn and not self.apply_chat_template:
            yield Violation(
                ("data.multiturn", "data.apply_chat_template"),
                "data.multiturn needs data.apply_chat_template, which shows where a turn begins: "
                "got true and false; set data.apply_chat_template",
            )


class SupervisedTrain(Section):
    """Optimizer steps."""

    needs = {
        "!train.dynamic_batch_enable": ("micro_batch_size",),
        "train.dynamic_batch_enable": ("max_tokens_per_gpu",),
    }

    batch_size: Int = option(
        128,
        "examples per optimizer step, over all ranks; the last step of a pass may have fewer",
        ge=1,
    )
    micro_batch_size: Int = option(
        8,
        "examples per forward-backward pass and data-parallel rank, packed without "
        "padding; see train.dynamic_batch_enable",
        ge=1,
        le=2**16,
    )
    dynamic_batch_enable: bool = added(
        False,
        "fill micro-batches up to a token budget (train.max_tokens_per_gpu) instead of with a "
        "fixed number of examples",
    )
    max_tokens_per_gpu: Int = added(
        16192,
        "with train.dynamic_batch_enable: tokens of a micro-batch on one rank (context-parallel "
        "ranks share a micro-batch: megatron.context_parallel_size times as many in total)",
        ge=1,
    )
    max_epochs: Int = option(2, "passes over the examples", ge=1)
    seed: Int = option(42, "seed of the example order", ge=0, le=2**31 - 1)
    full_determinism_enable: bool = option(
        False,
        "use only TransformerEngine's deterministic attention on GPUs; training on CPU is always "
        "deterministic",
    )
    corridor: str | None = added(None, CORRIDOR_ABOUT, path="input")
    corridor_action: Literal["warn", "fail"] = added("warn", CORRIDOR_ACTION_ABOUT)


class SupervisedEval(Section):
    """Evaluation during training."""

    needs = {"eval.dataset": ("steps", "split")}

    steps: Interval = option(
        -1,
        "optimizer steps between evaluations of eval.dataset, -1 = after every pass; there is "
        "always one before the first step",
    )
    dataset: str | None = option(
        None, "held-out examples; same forms as data.dataset", path="input"
    )
    split: str | None = option(
        None,
        "split of eval.dataset",
        default_text="validation, or test, where the data set has it, else train",
    )


class SupervisedCkpt(Saved):
    """What is kept on disk."""

    needs = {
        "ckpt.save_steps!=-1": ("save_hf", "max_num", "max_mem"),
        "ckpt.load_enable": ("fallback_enable",),
    }

    path: str = option(
        "./ckpt/checkpoints_sft",
        "folder of the checkpoints, on storage that all nodes share",
        path="output",
    )
    max_mem: Float = option(
        int(1e8),
        "disk space that resumable checkpoints may take, GB (1e9 bytes); the oldest are "
        "deleted, never the newest one",
        gt=0,
    )


class SupervisedWandb(Wandb):
    """Weights and Biases."""

    project: str = option("openrlhf_train_sft", "W&B project")
    run_name: str = option(
        lambda: datetime.now().strftime("sft_%m%dT%H:%M"),
        "name of the run, also of its TensorBoard folder",
        default_text="sft_<mmddTHH:MM>",
    )


class SupervisedLogger(Records):
    """Where metrics go."""

    wandb: SupervisedWandb = SupervisedWandb()


class SupervisedAdam(Adam):
    """Adam of supervised fine-tuning."""

    lr: Float = option(5e-6, "peak learning rate", ge=0)


class SupervisedDeepSpeed(DeepSpeedTraining):
    """Options of OpenRLHF's DeepSpeed backend."""

    packing_samples: bool = no_meaning(
        False,
        "concatenate examples without padding",
        why="micro-batches are always packed without padding",
        instead="leave it out",
    )
