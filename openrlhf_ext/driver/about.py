"""What a run says of itself: its first event, the last words of its command, and the model card,
README.md beside the final checkpoint in the form that the Hugging Face hub reads."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from openrlhf_ext.checkpoints import write_file
from openrlhf_ext.config import RunConfig, option_table
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.config.files import dataset_refs, inputs_of, is_hub_name
from openrlhf_ext.config.show import shown_options
from openrlhf_ext.inputs import named_part, sha256_of, split_inputs
from openrlhf_ext.options import required
from openrlhf_ext.options.sections import HeldOutSet
from openrlhf_ext.patches.environment import code_version
from openrlhf_ext.redaction import redact, redacted
from openrlhf_ext.reporting import duration, read_metrics
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.reporting.starts import Start, starts_of
from openrlhf_ext.run.checkpoints import resumption
from openrlhf_ext.run.ending import INTERRUPTED
from openrlhf_ext.run.records import about

logger = logging.getLogger(__name__)

_FEW_STEPS = 5
_COMMAND = "openrlhf-ext"
_SOME_DATA = "HELD_OUT.jsonl"  # where the run has no file of held-out problems
CARD = "README.md"
_ESTIMATOR = "algo.advantage.estimator"
_MARK = "openrlhf_ext"  # of the cards that are ours
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/(\w+)$")  # huggingface_hub's cache
_DATA = ("data.prompt_dataset", "eval.dataset")
_HELD_OUT = {"held_out": "accuracy", "held_out_score": "mean score"}


def results(config: RunConfig) -> dict[str, Any]:
    """Where the run began and where it is: ``steps``, and pairs of the first value and the last
    one. ``held_out`` has pairs of accuracy and standard error, ``held_out_score`` those of the mean
    score if it is another number, ``held_out_steps`` the steps after which they were measured;
    ``reward``, ``accuracy`` and, if it is another number, ``score`` are means over the first and
    the last few training steps, with standard errors."""
    path = Path(str(config.logger.metrics_path))
    records = read_metrics(path) if path.exists() else []
    evaluations = [record for record in records if "eval/accuracy" in record]
    steps = [record for record in records if "reward/mean" in record]
    found: dict[str, Any] = {"steps": max((int(record["step"]) for record in records), default=0)}
    if evaluations:
        ends = evaluations[0], evaluations[-1]
        found["held_out"] = [(end["eval/accuracy"], end["eval/accuracy_stderr"]) for end in ends]
        scores = [
            (e.get("eval/score_mean", e["eval/accuracy"]), e.get("eval/score_mean_stderr", 0.0))
            for e in ends
        ]
        if any(score != end["eval/accuracy"] for (score, _), end in zip(scores, ends, strict=True)):
            found["held_out_score"] = scores
        found["held_out_steps"] = [int(end["step"]) for end in ends]
    if steps:
        found["without_gradient"] = sum(record.get("grad_norm") == 0.0 for record in steps)
        few = found["averaged_steps"] = max(1, min(_FEW_STEPS, len(steps) // 2))
        for name in ("reward", "accuracy", "score"):
            found[name] = [
                _mean(
                    [part[f"{name if f'{name}/mean' in part else 'accuracy'}/mean"] for part in of]
                )
                for of in (steps[:few], steps[-few:])
            ]
        if found["score"] == found["accuracy"]:
            del found["score"]
    return found


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; None: one value does not tell."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def last_words(config: RunConfig, code: int, seconds: float) -> str:
    """The block of lines that ends a run's output, ``seconds`` after the command began."""
    found = results(config)
    how = (
        "has ended"
        if code == 0
        else "has failed"
        if code not in INTERRUPTED.values()
        else "was interrupted"
    )
    folder = Path(str(config.logger.metrics_path)).parent
    head = f"the run {how}: {found['steps']} steps, {duration(seconds)} in this command"
    paths = [("metrics", f"{config.logger.metrics_path}   (events.jsonl, samples.jsonl beside it)")]
    commands = []
    if Path(str(config.logger.metrics_path)).exists():
        commands.append(f"{_COMMAND} report {shlex.quote(str(folder))}")
    if code == 0:
        paths.insert(0, ("final checkpoint", config.ckpt.output_dir))
        commands += _evaluation(config)
    elif how == "has failed":
        commands.insert(0, f"once the cause is mended, {resumption(config)}")
    lines = [head, *(f"  {name:17} {text}" for name, text in [*_numbers(found), *paths])]
    if commands:
        lines += ["  next:", *(f"    {command}" for command in commands)]
    return redact("\n".join(lines))


def _numbers(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if idle := found.get("without_gradient"):
        lines.append(("no gradient", f"in {idle} of {found['steps']} steps"))
    for measured, name in _HELD_OUT.items():
        if measured in found:
            (first, then), (last, at) = zip(found[measured], found["held_out_steps"], strict=True)
            ends = f"{_shown(first)} after step {then}, {_shown(last)} after step {at}"
            lines.append((f"held-out {name}", ends if at > then else ends.split(",")[0]))
    if "reward" in found:
        few = found["averaged_steps"]
        of = "step" if few == 1 else f"{few} steps"
        for name, words in (
            ("accuracy", "accuracy"),
            ("score", "mean score"),
            ("reward", "reward"),
        ):
            if name not in found:
                continue
            first, last = map(_shown, found[name])
            lines.append(
                (f"training {words}", f"{first} in the first {of}, {last} in the last {of}")
            )
    return lines


def _shown(value: tuple[float, float | None]) -> str:
    mean, error = value
    return f"{mean:.3f}" if error is None else f"{mean:.3f} +- {error:.3f}"


def _evaluation(config: RunConfig) -> list[str]:
    """How the final checkpoint is evaluated as the run's own evaluations sample, set by set, and
    from the same seeds; nothing for an agent's rewards."""
    if config.train.agent_func_path is not None:
        return []
    some = config.eval.model_copy(update={"dataset": _SOME_DATA, "remote_url": None}).sets
    graded = [
        each for each in config.eval.sets or some if each.remote_url or config.reward.remote_url
    ]
    return [_evaluation_of(config, each) for each in graded]


def _evaluation_of(config: RunConfig, evaluated: HeldOutSet) -> str:
    data = config.data
    words = ["--model", config.ckpt.output_dir, "--data"]
    words += [evaluated.paths if Path(evaluated.paths).is_file() else _SOME_DATA]
    words += [
        "--reward",
        str(evaluated.remote_url or config.reward.remote_url),
        "--input_key",
        data.input_key,
    ]
    words += ["--label_key", data.label_key] if data.label_key is not None else []
    if data.apply_chat_template:
        words.append("--apply_chat_template")
    elif data.input_template is not None:
        words += ["--input_template", data.input_template]
    words += [
        "--temperature",
        f"{evaluated.temperature:g}",
        "--n",
        str(evaluated.n_samples_per_prompt),
    ]
    words += ["--top_p", f"{evaluated.top_p:g}"] if evaluated.top_p != 1 else []
    if (longest := evaluated.max_new_tokens or config.rollout.max_new_tokens) is not None:
        words += ["--max_new_tokens", str(longest)]
    words += ["--seed", str(config.train.seed)]
    return f"{_COMMAND} evaluate {shlex.join(words)}"


def about_run(config: RunConfig) -> dict[str, Any]:
    """What the first event of a run says."""
    return about(
        config, engines=config.vllm.num_engines, engine_tensor=config.vllm.tensor_parallel_size
    )


def write_card(config: RunConfig) -> None:
    """Writes the card of the run into ``ckpt.output_dir``; one that somebody else wrote there
    stays. Raises
    CheckpointError: the file cannot be written."""
    folder = Path(config.ckpt.output_dir)
    card = folder / CARD
    if card.exists() and _MARK not in card.read_text(errors="replace"):
        logger.warning("%s is not of a run and stays: no model card is written", card)
        return
    write_file(folder, CARD, ["\n".join(_lines(config, folder.name)).encode()])


def _lines(config: RunConfig, name: str) -> Iterator[str]:
    base, revision = _base(required(config.actor.model_name_or_path, "actor.model_name_or_path"))
    method, options, correction = algorithm_options(config)
    library, relation = (
        ("peft", "adapter") if config.ds.lora.rank > 0 else ("transformers", "finetune")
    )
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    head |= {"base_model": base, "base_model_relation": relation} if is_hub_name(base) else {}
    yield "---"
    yield from (f"{key}: {json.dumps(value)}" for key, value in head.items())
    events = config.logger.beside("events.jsonl")
    starts = starts_of(line for _, line in read_lines(events)) if events.is_file() else []
    methods = dict.fromkeys(
        [*(str(start.options.get(_ESTIMATOR, method)) for start in starts), method]
    )
    yield from (
        "tags:",
        f"- {_MARK}",
        "- reinforcement-learning",
        *(f"- {each}" for each in methods),
        "---",
        "",
    )
    yield from (f"# {name}", "")
    of_revision = f" (revision {revision})" if revision else ""
    yield f"`{base}`{of_revision}, trained by reinforcement learning with {_MARK} {code_version()},"
    yield f"{datetime.now(UTC):%Y-%m-%d}. Written by the run itself; change it as you like."
    found = results(config)
    yield from ("", "## Numbers", "")
    yield (
        f"Steps: {found['steps']}. First and last numbers of the run's metrics.jsonl, with "
        "standard errors:"
    )
    yield ""
    yield from _table(("number", "measured"), _numbers(found))
    of_last = ""
    if len(starts) > 1:
        of_last = f", {starts[-1].steps}"
        yield from ("", "## Starts", "", "The run went on with other options:", "")
        yield from _table(
            ("steps", "options"), [(start.steps, _changed(start, starts)) for start in starts]
        )
    yield from ("", "## Method", "")
    yield from (f"Estimator `{method}` ({_ESTIMATOR}){of_last}, with these options:", "")
    yield from _table(
        ("option", "value"),
        sorted({**options, "importance correction": correction or "off"}.items()),
    )
    yield from ("", "## Data", "")
    yield from _table(("use", "name", "SHA-256"), _data(config))
    yield from ("", f"## Options that the run was given{of_last}", "")
    yield from _table(("option", "value"), _given(config))
    yield from ("", "## License", "")
    yield from (
        "That of the base model and of the data, which the run does not know: add it before "
        "publishing.",
        "",
    )


def _changed(start: Start, starts: Sequence[Start]) -> str:
    """The options of a start that are not the same in all; of paths the last name."""
    names = {
        name
        for each in starts
        for name, value in each.options.items()
        if start.options.get(name) != value
    }
    paths = {
        name
        for name in names
        if (option := option_table().get(name)) is not None and option.info.path
    }
    values = {name: start.options.get(name) for name in sorted(names)}
    return ", ".join(f"`{n}` {Path(str(v)).name if n in paths else v}" for n, v in values.items())


def _base(path: str) -> tuple[str, str]:
    """Name of the base model, the hub's where it came from there, and its revision; no folders of
    this machine."""
    if match := _SNAPSHOT.search(path):
        return f"{match[1]}/{match[2]}", match[3]
    return Path(path).name, ""


def _data(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    for option in _DATA:
        for dataset in dataset_refs(inputs_of(config, option)):
            path = Path(dataset.path)
            if path.is_file():
                yield option, path.name, sha256_of(path)
            elif dataset.path:
                yield (
                    option,
                    dataset.path if is_hub_name(dataset.path) else path.name,
                    "not one file",
                )


def _given(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Options that were set and mean something elsewhere: of paths the last name."""
    shown, table = shown_options(config), option_table()
    for name in sorted(set(config.sources) & shown.keys()):
        # said above
        if (kind := table[name].info.path) == "output" or name == "actor.model_name_or_path":
            continue
        value = shown[name]
        if kind == "input" and isinstance(value, str) and "://" not in value:
            parts = map(named_part, split_inputs(value))
            value = ",".join(
                f"{of}={Path(path).name}" if of else Path(path).name for of, path in parts
            )
        yield name, value


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = (
            cell if isinstance(cell, str) else json.dumps(redacted(cell), default=str)
            for cell in row
        )
        yield (
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        )
