"""The model card: README.md beside the final checkpoint, in the form that the Hugging Face hub reads."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openrlhf_ext
from openrlhf_ext.checkpoints import write_file
from openrlhf_ext.config import RunConfig, option_table, value_of
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.config.files import dataset_refs, is_hub_name
from openrlhf_ext.driver.about import shown_options
from openrlhf_ext.driver.ending import results
from openrlhf_ext.driver.settings import policy_path
from openrlhf_ext.redaction import redacted

logger = logging.getLogger(__name__)

CARD = "README.md"
_MARK = "openrlhf_ext"  # of the cards that are ours
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/(\w+)$")  # huggingface_hub's cache
_DATA = ("data.prompt_dataset", "eval.dataset")
_GIT_S = 10.0


def write_card(config: RunConfig) -> None:
    """Writes the card of the run into ``ckpt.output_dir``; one that somebody else wrote there stays.

    Raises:
        CheckpointError: the file cannot be written.
    """
    folder = Path(config.ckpt.output_dir)
    card = folder / CARD
    if card.exists() and _MARK not in card.read_text(errors="replace"):
        logger.warning("%s is not of a run and stays: no model card is written", card)
        return
    write_file(folder, CARD, ["\n".join(_lines(config, folder.name)).encode()])


def _lines(config: RunConfig, name: str) -> Iterator[str]:
    base, revision = _base(policy_path(config))
    method, options, correction = algorithm_options(config)
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head |= {"base_model": base, "base_model_relation": "finetune"} if is_hub_name(base) else {}
    yield "---"
    yield from (f"{key}: {json.dumps(value)}" for key, value in head.items())
    yield from ("tags:", f"- {_MARK}", "- reinforcement-learning", f"- {method}", "---", "", f"# {name}", "")
    of_revision = f" (revision {revision})" if revision else ""
    yield f"`{base}`{of_revision}, trained by reinforcement learning with {_made_by()},"
    yield f"{datetime.now(UTC):%Y-%m-%d}. Written by the run itself; change it as you like."
    yield from ("", "## Numbers", "", *_numbers(config))
    yield from ("", "## Method", "", f"Estimator `{method}` (algo.advantage.estimator), with these options:", "")
    yield from _table(("option", "value"), sorted({**options, "importance correction": correction or "off"}.items()))
    yield from ("", "## Data", "")
    yield from _table(("use", "name", "SHA-256"), _data(config))
    yield from ("", "## Options that the run was given", "")
    yield from _table(("option", "value"), _given(config))
    yield from ("", "## License", "")
    yield from ("That of the base model and of the data, which the run does not know: add it before publishing.", "")


def _base(path: str) -> tuple[str, str]:
    """Name of the base model, the hub's where it came from there, and its revision; no folders of this machine."""
    if match := _SNAPSHOT.search(path):
        return f"{match[1]}/{match[2]}", match[3]
    return Path(path).name, ""


def _made_by() -> str:
    """The package's version, and the commit of its checkout where it runs from one."""
    checkout = Path(openrlhf_ext.__file__).parents[1]
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    made_by = f"openrlhf_ext {openrlhf_ext.__version__}"
    if not (checkout / ".git").exists():  # installed, perhaps inside of somebody else's repository
        return made_by
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:  # no git here: the version has to do
        logger.debug("the commit is not known: %s", error)
        return made_by
    return f"{made_by}, commit {done.stdout.strip()}" if done.returncode == 0 else made_by


def _numbers(config: RunConfig) -> Iterator[str]:
    found = results(config)
    rows = []
    if "reward" in found:
        few = found["averaged_steps"]
        of = "step" if few == 1 else f"{few} steps"
        (first, _), (last, _) = found["reward"]
        rows.append(("reward of the sampled completions", f"{first:.3f} ({of})", f"{last:.3f} ({of})"))
    if "held_out" in found:
        (first, then), (last, at) = zip(found["held_out"], found["held_out_steps"], strict=True)
        rows.append(("held-out accuracy", _accuracy(first, then), _accuracy(last, at)))
    yield f"Steps: {found['steps']}. First and last numbers of the run's metrics.jsonl:"
    yield ""
    yield from _table(("", "first", "last"), rows)


def _accuracy(measured: tuple[float, float], step: int) -> str:
    accuracy, error = measured
    return f"{100 * accuracy:.1f} % (standard error {100 * error:.1f}, step {step})"


def _data(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    for option in _DATA:
        for dataset in dataset_refs(value_of(config, option) or ""):
            path = Path(dataset.path)
            if path.is_file():
                with path.open("rb") as file:
                    yield option, path.name, hashlib.file_digest(file, "sha256").hexdigest()
            elif dataset.path:
                yield option, dataset.path if is_hub_name(dataset.path) else path.name, "not one file"


def _given(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Options that were set and mean something elsewhere: of paths the last name."""
    shown, table = shown_options(config), option_table()
    for name in sorted(set(config.sources) & shown.keys()):
        if (kind := table[name].info.path) == "output" or name == "actor.model_name_or_path":  # said above
            continue
        value = shown[name]
        if kind == "input" and isinstance(value, str) and "://" not in value:
            value = ",".join(Path(part).name for part in value.split(","))
        yield name, value


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = (cell if isinstance(cell, str) else json.dumps(redacted(cell), default=str) for cell in row)
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
