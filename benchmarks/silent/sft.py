"""Published bugs of supervised fine-tuning, and the lab that puts them into runs of ``train_sft``.

A trial is a run of its own, of one rank, in a process that is forked from one that has imported
everything. A fault of the data is there from the first step on, any other after ``FAULTY_FROM``
steps. One that happens on resume takes a second process, which goes on from the first one's
checkpoint.
"""

# ruff: noqa: E402  patches come before what they patch

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from openrlhf_ext import patches as upstream

upstream.apply()

# every trial is forked from a process that has imported them
import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401

from benchmarks.silent import faults
from benchmarks.silent.faults import wrapped, wrapped_method
from benchmarks.silent.lab import FAULTY_FROM, STEPS, Fault, Outcome, Patches
from openrlhf_ext import compat  # noqa: F401  the same
from openrlhf_ext.cli import train_sft
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.reporting import read_metrics
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.sft import train
from openrlhf_ext.sft.checkpoints import Ranks
from openrlhf_ext.sft.turns import Example, ExampleForm

BATCH, HELD_OUT, MAX_LEN, WARM_STEPS = 16, 32, 208, 80
FIRST_TOKEN = "<|endoftext|>"  # of every text: the toy's tokenizer has none of its own
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
OPTIONS: dict[str, object] = {
    "data.input_key": "messages", "data.apply_chat_template": "true", "data.multiturn": "true",
    "data.max_len": MAX_LEN, "data.tokenizer_chat_template": TEMPLATE, "eval.steps": 2, "megatron.param_dtype": "fp32",
    "train.batch_size": BATCH, "train.micro_batch_size": 4, "train.max_epochs": 1, "adam.lr": 3e-4,
    "model.num_gpus_per_node": 1,
}  # fmt: skip
FAULTS: list[Fault] = []
_TRIAL_S = 900.0  # on a busy machine


# ---- trials


class Lab:
    """Runs on chats of the toy's arithmetic, single questions first and then several in a chat, a
    few of them longer than ``MAX_LEN``. They begin with a model that has seen the template, and
    other chats, for ``WARM_STEPS`` steps."""

    def __init__(self, name: str, folder: Path, toy: Path) -> None:
        self.folder, self.toy = folder, toy

    @contextlib.contextmanager
    def opened(self) -> Iterator[Lab]:
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["benchmarks.silent.sft"])
        # else the command was stopped
        if not (self.folder / "warm/model/model.safetensors").exists():
            self._warm_up()
        yield self

    def _warm_up(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        toy = self.folder / "toy"
        shutil.copytree(self.toy / "warm_start", toy, ignore=shutil.ignore_patterns("checkpoints"))
        about = json.loads((toy / "tokenizer_config.json").read_text())
        (toy / "tokenizer_config.json").write_text(json.dumps({**about, "bos_token": FIRST_TOKEN}))
        records, held_out = (
            iter(
                [
                    json.loads(line)
                    for line in (self.toy / f"data/{name}.jsonl").read_text().splitlines()
                ]
            )
            for name in ("train", "heldout")
        )
        _write_chats(records, self.folder / "train.jsonl", STEPS * BATCH)
        _write_chats(records, self.folder / "warm.jsonl", WARM_STEPS * BATCH)
        _write_chats(held_out, self.folder / "held_out.jsonl", HELD_OUT)
        out = self.folder / "warm"
        out.mkdir()
        words = self._words(
            toy, 1, out, **{"data.dataset": self.folder / "warm.jsonl", "adam.lr": 1e-3}
        )
        if error := self._run(words, "", "with it", out):
            raise RuntimeError(error)

    def _words(self, model: Path, seed: int, out: Path, **more: object) -> list[str]:
        options = (
            OPTIONS
            | {
                "model.model_name_or_path": model,
                "data.dataset": self.folder / "train.jsonl",
                "eval.dataset": self.folder / "held_out.jsonl",
                "train.seed": seed,
                "ckpt.output_dir": out / "model",
                "ckpt.path": out / "steps",
                "logger.metrics_path": out / "metrics.jsonl",
            }
            | more
        )
        return [word for name, value in options.items() for word in (f"--{name}", str(value))]

    def trial(self, seed: int, fault: Fault | None = None) -> Outcome:
        out, began = self.folder / "trial", time.monotonic()
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        words = self._words(self.folder / "warm/model", seed, out)
        name = "" if fault is None else fault.name
        if fault is not None and fault.resumes:
            self._run(words, name, "until the fault", out)
            words += ["--ckpt.load_enable", "true"]
        error = self._run(words, name, "with it", out)
        records: dict[int, dict[str, Any]] = {}
        metrics = out / "metrics.jsonl"  # none if the examples were refused
        # an evaluation has one of its own
        for record in read_metrics(metrics) if metrics.exists() else ():
            if record["step"]:
                records.setdefault(record["step"], {}).update(record)
        told = [record for _, record in read_lines(out / "events.jsonl")]
        return Outcome(seed, list(records.values()), told, error, time.monotonic() - began)

    def _run(self, words: list[str], fault: str, part: str, out: Path) -> str | None:
        """The error that ended the run. Raises RuntimeError: its process did not tell."""
        told = out / "ended.json"
        told.unlink(missing_ok=True)
        process = self._processes.Process(target=_run, args=(words, fault, part, out))
        process.start()
        process.join(_TRIAL_S)
        process.kill()
        process.join()
        if not told.exists():
            raise RuntimeError(
                f"a run of {fault or 'no fault'} has not ended or has died: {out / 'log'}"
            )
        return json.loads(told.read_text())


def _write_chats(records: Iterator[dict[str, str]], target: Path, chats: int) -> None:
    lines = []
    for number in range(chats):
        turns = 1 if number < chats // 2 else 2 + number % 4  # one of four becomes too long
        asked = [next(records) for _ in range(turns)]
        lines.append(
            json.dumps(
                {
                    "messages": [
                        {"role": role, "content": record[key]}
                        for record in asked
                        for role, key in (("user", "question"), ("assistant", "answer"))
                    ]
                }
            )
            + "\n"
        )
    target.write_text("".join(lines))


def _run(words: list[str], name: str, part: str, out: Path) -> None:
    """In the forked process."""
    with (out / "log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    fault = next((fault for fault in FAULTS if fault.name == name), None)
    error = None
    with contextlib.ExitStack() as stack:
        if fault is not None and part == "until the fault":
            stack.enter_context(_before_step(FAULTY_FROM, _end))
        elif fault is not None and (fault.resumes or fault.at == "data"):
            for each in fault.patches(None):
                stack.enter_context(each)
        elif fault is not None:
            stack.enter_context(_before_step(FAULTY_FROM, partial(_spoil, stack, fault.patches)))
        try:
            status = train_sft.start(words)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        else:
            if status != (0 if part == "with it" else 128 + signal.SIGTERM):
                raise RuntimeError(f"the run ended with status {status}")
    (out / "ended.json").write_text(json.dumps(error))


def _before_step(step: int, act: Callable[[Any], None]) -> Any:
    """``act(run)`` when so many steps are done."""

    def due(original: Any, run: Any, every: int, otherwise: int | None) -> bool:
        if run.step == step and every == run.config.eval.steps:  # it is asked first after a step
            act(run)
        return original(run, every, otherwise)

    return wrapped_method(train.Supervised, "_due", due)


def _end(run: Any) -> None:
    run.received.append(signal.SIGTERM)


def _spoil(stack: contextlib.ExitStack, patches: Patches, run: Any) -> None:
    for each in patches(run):
        stack.enter_context(each)


# ---- faults of the data


def fault(issue: str, what: str, at: str, **more: Any) -> Callable[[Callable], Callable]:
    def keep(patches: Callable) -> Callable:
        FAULTS.append(Fault(patches.__name__, issue, what, at, patches, lab="sft", **more))
        return patches

    return keep


def examples_otherwise(change: Callable[[Example], Example]) -> list[Any]:
    """Tokens and ranges of every example, held-out ones too."""
    return [wrapped_method(ExampleForm, "example", lambda original, *args: change(original(*args)))]


def ranges_otherwise(change: Callable[[Example], list[tuple[int, int]]]) -> list[Any]:
    return examples_otherwise(lambda example: dataclasses.replace(example, ranges=change(example)))


@fault("slime#1307", "a chat that was put through the template becomes a message of a chat", "data")
def template_twice(_: Any) -> list[Any]:
    def chat(original: Any, form: Any, prompt: Any, answer: Any) -> Any:
        asked = form._render(prompt[:-1]).removeprefix(FIRST_TOKEN)
        return original(form, [{"role": "user", "content": asked}, prompt[-1]], answer)

    return [wrapped_method(ExampleForm, "_chat", chat)]


@fault("alignment-handbook#127", "the beginning of text is there twice", "data")
def beginning_twice(_: Any) -> list[Any]:
    def tokens(original: Any, form: Any, text: str) -> list[int]:
        ids = original(form, text)
        return [ids[0], *ids] if text.startswith(FIRST_TOKEN) else ids

    return [wrapped_method(ExampleForm, "_tokens", tokens)]


@fault("Megatron-Bridge#4265", "the token that ends an answer is not trained", "data")
def no_end(_: Any) -> list[Any]:
    # behind an answer that is not the last one the template writes a line end, too
    return ranges_otherwise(
        lambda example: [
            (start, stop - 1 - (stop < len(example.ids))) for start, stop in example.ranges
        ]
    )


@fault(
    "open-instruct#1876",
    "an example that is cut has no end token: the model is taught not to stop",
    "data",
)
def no_end_of_cut_examples(_: Any) -> list[Any]:
    def cut(original: Any, form: Any, text: str, spans: Any) -> Any:
        ids, ranges = original(form, text, spans)
        return ([*ids[:-1], ids[-2]] if len(ids) == form.max_len else ids), ranges

    return [wrapped_method(ExampleForm, "_example", cut)]


@fault(
    "verl#601",
    "examples are cut at their beginning, and what is trained on is not moved with them",
    "data",
)
def cut_at_the_beginning(_: Any) -> list[Any]:
    def cut(original: Any, form: Any, text: str, spans: Any) -> Any:
        whole, _ = original(dataclasses.replace(form, max_len=10**6), text, spans)
        _, ranges = original(form, text, spans)
        return whole[-form.max_len :], ranges

    return [wrapped_method(ExampleForm, "_example", cut)]


@fault("trl#3781", "the loss is over all tokens, not only the assistant's", "data")
def loss_on_all(_: Any) -> list[Any]:
    return ranges_otherwise(lambda example: [(1, len(example.ids))])


@fault("NeMo-Speech#16284", "only the last answer of a chat is trained", "data")
def last_answer_only(_: Any) -> list[Any]:
    return ranges_otherwise(lambda example: example.ranges[-1:])


@fault("mlx-vlm#970", "all that follows the first answer is trained, the user's words too", "data")
def users_turns(_: Any) -> list[Any]:
    return ranges_otherwise(lambda example: [(example.ranges[0][0], len(example.ids))])


@fault("verl#3287", "the first token of an answer is not trained", "data")
def first_token_masked(_: Any) -> list[Any]:
    return ranges_otherwise(lambda example: [(start + 1, stop) for start, stop in example.ranges])


@fault("OpenJarvis#521", "examples are filled up with end tokens, which are trained on", "data")
def padding_trained(_: Any) -> list[Any]:
    def pad(example: Example) -> Example:
        ids, (start, _) = (
            example.ids + example.ids[-1:] * (MAX_LEN - len(example.ids)),
            example.ranges[-1],
        )
        return dataclasses.replace(
            example, ids=ids, ranges=[*example.ranges[:-1], (start, MAX_LEN)]
        )

    return examples_otherwise(pad)


@fault("NeMo-Aligner#29", "the examples are not shuffled", "data")
def not_shuffled(_: Any) -> list[Any]:
    return [
        patch.object(
            train.Supervised, "_rows", lambda run, step: [*range(step * BATCH, (step + 1) * BATCH)]
        )
    ]


@fault("OpenRLHF#1089", "the held-out examples are taken from those that are trained on", "data")
def trains_what_it_evaluates(_: Any) -> list[Any]:
    def read(original: Any, config: Any) -> tuple[SequenceBatch, SequenceBatch]:
        examples, _ = original(config)
        return examples, examples.select(slice(len(examples) - HELD_OUT, len(examples)))

    return [wrapped(train, "read_examples", read)]


@fault("Soup#680", "some held-out examples are in the training split", "data")
def some_examples_twice(_: Any) -> list[Any]:
    def read(original: Any, config: Any) -> tuple[SequenceBatch, SequenceBatch]:
        examples, held_out = original(config)
        return _joined(
            held_out.select(slice(0, 8)), examples.select(slice(8, len(examples)))
        ), held_out

    return [wrapped(train, "read_examples", read)]


def _joined(*batches: SequenceBatch) -> SequenceBatch:
    sequences: list[np.ndarray] = []
    ranges: list[list[tuple[int, int]]] = []
    for batch in batches:
        for row in range(len(batch)):
            of = batch.select([row])
            sequences.append(of.tokens_M.numpy())
            ranges.append([(int(start), int(stop)) for start, stop in of.ranges_R2])
    return sequence_batch(sequences, ranges)


# ---- faults of the step


@fault("transformers#46898", "labels are shifted twice", "rank")
def labels_shifted_twice(_: Any) -> list[Any]:
    return [
        faults.head_otherwise(
            lambda arguments: arguments | {"target_T": arguments["target_T"].roll(-1)}
        )
    ]


@fault("transformers#46634", "examples of a pack see each other", "rank")
def packs_leak(run: Any) -> list[Any]:
    return faults.packs_leak(run)


@fault("LlamaFactory#7318", "positions of a packed example are wrong", "rank")
def wrong_positions(run: Any) -> list[Any]:
    return faults.wrong_positions(run)


def loss_otherwise(change: Callable[[Any, int], float]) -> list[Any]:
    """A micro-batch's loss as a mean over ``change(part, tokens)`` tokens, ``tokens`` being those
    of the whole step."""

    def loss(original: Any, policy: Any, part: Any, states: Any, shaped: Any, *more: Any) -> Any:
        return original(
            policy,
            part,
            states,
            dataclasses.replace(shaped, tokens=change(part, shaped.tokens)),
            *more,
        )

    return [wrapped_method(MegatronPolicy, "_loss", loss)]


@fault("transformers#24725", "micro-batches are averaged, each over its own tokens", "rank")
def mean_of_means(_: Any) -> list[Any]:
    return loss_otherwise(lambda part, _: part.response_tokens * (BATCH // 4))


@fault("transformers#35438", "the loss grows with the steps of gradient accumulation", "rank")
def times_micro_batches(_: Any) -> list[Any]:
    return loss_otherwise(lambda _, tokens: tokens / (BATCH // 4))


@fault("labs-molt#56", "the reported loss is the share of one micro-batch", "rank")
def reports_a_share(run: Any) -> list[Any]:
    return [
        wrapped(
            run.policy.schedule,
            "sum_metrics",
            lambda original, losses, *more: original(losses[-1:], *more),
        )
    ]


@fault("Model-Optimizer#2322", "norms never move: their steps are lost in bf16", "rank")
def frozen_norms(run: Any) -> list[Any]:
    return [faults.frozen(run, "norm")]


@fault("mala#374", "the learning rate is ten times what it says", "rank")
def another_learning_rate(run: Any) -> list[Any]:
    return faults.another_learning_rate(run)


@fault(
    "transformers#24088", "the schedule of the learning rate moves once for every process", "rank"
)
def schedule_too_fast(run: Any) -> list[Any]:
    return [wrapped(run.policy.scheduler, "step", lambda original, steps: original(2 * steps))]


# ---- faults of going on


def after_loading(change: Callable[[Any], None]) -> list[Any]:
    def load(original: Any, ranks: Any, *args: Any, **kwargs: Any) -> None:
        original(ranks, *args, **kwargs)
        change(ranks)

    return [wrapped_method(Ranks, "load_state", load)]


@fault("tinker-feedback#126", "Adam's moments are lost when a run goes on", "rank", resumes=True)
def moments_lost(_: Any) -> list[Any]:
    return after_loading(faults.lose_moments)


@fault("OpenTau#185", "weights go through bf16 when a run goes on", "rank", resumes=True)
def weights_rounded_on_resume(_: Any) -> list[Any]:
    return after_loading(faults.round_weights)


@fault("prime-rl#745", "the examples begin anew when a run goes on", "rank", resumes=True)
def examples_begin_anew(_: Any) -> list[Any]:
    return [
        wrapped_method(
            train.Supervised, "_rows", lambda original, run, step: original(run, step - FAULTY_FROM)
        )
    ]
