"""One GRPO run with TRL, for benchmarks/end_to_end.py, which starts it in an environment that has
TRL and not us.

    python benchmarks/end_to_end_trl.py settings.json

The settings name model, data, reward file, sizes and schedule. ``metrics.jsonl`` in their
``output_dir`` gets our names (docs/metrics.md), ``versions.json`` what is installed. The clock:
callbacks say when a step has ended, a subclass of ``GRPOTrainer`` times two of its methods, and
``model.generate`` and the reward function are timed where they are called. An evaluation runs
between two steps and is not part of either.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

EVALUATION_BATCH = 256


class Clock:
    """Seconds by phase, since the last ``take``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def timed(self, name: str, function: Callable) -> Callable:
        """The function, its seconds added to the phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return call

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class TimedTrainer(GRPOTrainer):
    """TRL's trainer; what it does is timed, not changed."""

    clock: Clock

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.clock.phase("training_step"):
            return super().training_step(*args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.phase("rollouts"):
            return super()._prepare_inputs(*args, **kwargs)


class Recorder(TrainerCallback):
    """Writes a record at the end of every step, and evaluates where it is due."""

    def __init__(
        self, settings: dict[str, Any], clock: Clock, reward: Reward, evaluate: Callable[[], float]
    ) -> None:
        self.settings, self.clock, self.reward, self.evaluate = settings, clock, reward, evaluate
        self.path = Path(settings["output_dir"]) / "metrics.jsonl"

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        self._evaluate(0)
        self.started = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, **kwargs: Any) -> None:
        self.optimizer_started = time.perf_counter()

    def on_optimizer_step(self, args, state, control, **kwargs: Any) -> None:
        self.clock.seconds["optimizer"] += time.perf_counter() - self.optimizer_started

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        seconds, total = self.clock.take(), time.perf_counter() - self.started
        self._write({"step": state.global_step, **phases(seconds, total), **self.reward.take()})
        every = self.settings["eval_steps"]
        if every and (state.global_step % every == 0 or state.global_step == state.max_steps):
            self._evaluate(state.global_step)
        self.started = time.perf_counter()

    def _evaluate(self, step: int) -> None:
        if self.settings["eval_steps"]:
            started = time.perf_counter()
            accuracy = self.evaluate()
            self._write(
                {
                    "step": step,
                    "eval/accuracy": accuracy,
                    "time/eval": time.perf_counter() - started,
                }
            )
            self.clock.take()
            self.reward.forget()

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record | {"time": time.time()}) + "\n")


def phases(seconds: dict[str, float], step: float) -> dict[str, float]:
    """Our names. TRL takes no old log-probs when there is one update per batch, and needs no weight
    sync."""
    generate, grade = seconds.get("generate", 0.0), seconds.get("grade", 0.0)
    train = seconds["training_step"] - seconds["rollouts"] + seconds.get("optimizer", 0.0)
    return {
        "time/generate": generate,
        "time/grade": grade,
        "time/logprob": 0.0,
        "time/train": train,
        "time/sync": 0.0,
        "time/step": step,
    }


class Reward:
    """OpenRLHF's reward function as TRL calls it, and what the step's completions were."""

    __name__ = "reward"

    def __init__(self, path: str, label_key: str, clock: Clock) -> None:
        spec = importlib.util.spec_from_file_location("reward", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["reward"] = module
        spec.loader.exec_module(module)
        self.function, self.label_key, self.clock = module.reward_func, label_key, clock
        self.forget()

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        with self.clock.phase("grade"):
            results = self.grade(prompts, completions, columns[self.label_key])
            self.rewards += [float(result["rewards"]) for result in results]
            self.tokens += sum(len(ids) for ids in columns["completion_ids"])
        return [float(result["rewards"]) for result in results]

    def grade(
        self, prompts: list[str], completions: list[str], labels: list[str]
    ) -> list[dict[str, Any]]:
        rows = zip(prompts, completions, labels, strict=True)
        return [self.function([prompt + text], [prompt], [label]) for prompt, text, label in rows]

    def take(self) -> dict[str, float]:
        """What the completions were since the last call."""
        taken = {
            "tokens/generated": self.tokens,
            "reward/mean": sum(self.rewards) / len(self.rewards),
            "response/length_mean": self.tokens / len(self.rewards),
        }
        self.forget()
        return taken

    def forget(self) -> None:
        self.rewards, self.tokens = [], 0


def read_rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def accuracy(model: Any, tokenizer: Any, settings: dict[str, Any], reward: Reward) -> float:
    """Mean score of sampled completions (temperature 1) of every held-out problem; leaves the
    random state alone."""
    rows = read_rows(settings["heldout"]) * settings["eval_samples"]
    scores = []
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for start in range(0, len(rows), EVALUATION_BATCH):
            batch = rows[start : start + EVALUATION_BATCH]
            prompts = [row[settings["input_key"]] for row in batch]
            inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
            output = model.generate(
                **inputs,
                max_new_tokens=settings["max_new_tokens"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
            results = reward.grade(prompts, texts, [row[settings["label_key"]] for row in batch])
            scores += [float(result["scores"]) for result in results]
    model.train(was_training)
    return sum(scores) / len(scores)


def configuration(settings: dict[str, Any]) -> GRPOConfig:
    """One update per rollout batch, all of it in one micro-batch: TRL's fastest here."""
    samples = settings["prompts"] * settings["group"]
    return GRPOConfig(
        output_dir=settings["output_dir"],
        max_steps=settings["steps"],
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # TRL's defaults are for GPUs
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=settings["group"],
        max_completion_length=settings["max_new_tokens"],
        temperature=1.0,
        top_k=0,
        loss_type=settings["loss_type"],
        beta=0.0,
        epsilon=0.2,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=math.ceil(settings["warmup_ratio"] * settings["steps"]),
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    output_dir = Path(settings["output_dir"])
    versions = {d.metadata["Name"]: d.version for d in distributions()}
    (output_dir / "versions.json").write_text(json.dumps(versions))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    rows = read_rows(settings["train"])
    dataset = Dataset.from_list([row | {"prompt": row[settings["input_key"]]} for row in rows])
    clock = Clock()
    reward = Reward(settings["reward"], settings["label_key"], clock)
    recorder = Recorder(
        settings, clock, reward, lambda: accuracy(model, tokenizer, settings, reward)
    )
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=configuration(settings),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[recorder],
    )
    trainer.clock = clock
    model.generate = clock.timed("generate", model.generate)
    trainer.train()
    trainer.save_model(str(output_dir / "policy"))


if __name__ == "__main__":
    main()
