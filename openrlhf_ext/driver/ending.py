"""What a run says at its end: how long it took, what it came to, where that is, and what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from openrlhf_ext.checkpoints import CheckpointStore
from openrlhf_ext.config import RunConfig
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting import duration, read_metrics

_FEW_STEPS = 5
_COMMAND = "openrlhf-ext"
_SOME_DATA = "HELD_OUT.jsonl"  # where the run has no file of held-out problems


def resume_line(folder: str) -> str:
    """How a user goes on with a run that was interrupted."""
    return f"to go on from {folder}: the same command with --ckpt.load_enable"


def results(config: RunConfig) -> dict[str, Any]:
    """Where the run began and where it is: ``steps``, and pairs of the first value and the last one.

    ``held_out`` has pairs of accuracy and standard error, ``held_out_steps`` the steps after which they were measured.
    ``reward`` and ``accuracy`` are of training: means over the first and the last few steps, and standard errors of
    these means.
    """
    path = Path(str(config.logger.metrics_path))
    records = read_metrics(path) if path.exists() else []
    evaluations = [record for record in records if "eval/accuracy" in record]
    steps = [record for record in records if "reward/mean" in record]
    found: dict[str, Any] = {"steps": max((int(record["step"]) for record in records), default=0)}
    if evaluations:
        ends = evaluations[0], evaluations[-1]
        found["held_out"] = [(end["eval/accuracy"], end["eval/accuracy_stderr"]) for end in ends]
        found["held_out_steps"] = [int(end["step"]) for end in ends]
    if steps:
        few = found["averaged_steps"] = max(1, min(_FEW_STEPS, len(steps) // 2))
        for name in ("reward", "accuracy"):
            found[name] = [_mean([part[f"{name}/mean"] for part in of]) for of in (steps[:few], steps[-few:])]
    return found


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None: one value does not tell."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def last_words(config: RunConfig, code: int, seconds: float) -> str:
    """The block of lines that ends a run's output.

    Args:
        code: the exit code of the run.
        seconds: since the command began.
    """
    found = results(config)
    how = "has ended" if code == 0 else "has failed" if code not in (130, 143) else "was interrupted"
    folder = Path(str(config.logger.metrics_path)).parent
    head = f"the run {how}: {found['steps']} steps, {duration(seconds)} in this command"
    paths = [("metrics", f"{config.logger.metrics_path}   (events.jsonl, samples.jsonl beside it)")]
    commands = [f"{_COMMAND} report {shlex.quote(str(folder))}"]
    if code == 0:
        paths.insert(0, ("final checkpoint", config.ckpt.output_dir))
        commands += _evaluation(config)
    elif how == "has failed":
        commands.insert(0, _resumption(config))
    lines = [head, *(f"  {name:17} {text}" for name, text in [*_numbers(found), *paths])]
    return redact("\n".join([*lines, "  next:", *(f"    {command}" for command in commands)]))


def _numbers(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if "held_out" in found:
        (first, then), (last, at) = zip(found["held_out"], found["held_out_steps"], strict=True)
        ends = f"{_shown(first)} after step {then}, {_shown(last)} after step {at}"
        lines.append(("held-out accuracy", ends if at > then else ends.split(",")[0]))
    if "reward" in found:
        few = found["averaged_steps"]
        of = "step" if few == 1 else f"{few} steps"
        for name in ("accuracy", "reward"):
            first, last = map(_shown, found[name])
            lines.append((f"training {name}", f"{first} in the first {of}, {last} in the last {of}"))
    return lines


def _shown(value: tuple[float, float | None]) -> str:
    mean, error = value
    return f"{mean:.3f}" if error is None else f"{mean:.3f} +- {error:.3f}"


def _resumption(config: RunConfig) -> str:
    newest = CheckpointStore(config.ckpt.path, config.ckpt.max_num).checkpoints()[-1:]
    if not newest:
        return f"no checkpoint is in {config.ckpt.path}: the run has to begin again"
    return f"once the cause is mended, {resume_line(str(newest[0]))}"


def _evaluation(config: RunConfig) -> list[str]:
    """How the final checkpoint is evaluated as the run's own evaluations sample; nothing for an agent's rewards."""
    if config.reward.remote_url is None or config.train.agent_func_path is not None:
        return []
    data, evaluated = config.data, config.eval
    own = evaluated.dataset is not None and Path(evaluated.dataset).is_file()
    words = ["--model", config.ckpt.output_dir, "--data", str(evaluated.dataset) if own else _SOME_DATA]
    words += ["--reward", config.reward.remote_url, "--input_key", data.input_key]
    words += ["--label_key", data.label_key] if data.label_key is not None else []
    if data.apply_chat_template:
        words.append("--apply_chat_template")
    elif data.input_template is not None:
        words += ["--input_template", data.input_template]
    words += ["--temperature", f"{evaluated.temperature:g}", "--n", str(evaluated.n_samples_per_prompt)]
    words += ["--top_p", f"{evaluated.top_p:g}"] if evaluated.top_p != 1 else []
    if config.rollout.max_new_tokens is not None:
        words += ["--max_new_tokens", str(config.rollout.max_new_tokens)]
    return [f"{_COMMAND} evaluate {shlex.join(words)}"]
