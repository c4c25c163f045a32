"""``openrlhf-ext chaos [RUN.yaml] --minutes N --seed S --output FOLDER [--section.name value
...]``: faults.

Runs it once undisturbed, then repeatedly with faults drawn from the seed, each in a random phase:
processes that die, stop or run out of memory, full disks, damaged checkpoints, reward functions
that misbehave, a network that is cut. The results are on the terminal and in FOLDER/chaos.json
(docs/faults.md). Everything is written below FOLDER; without RUN.yaml the run is a toy. Exit
status: 0 if the run survived every fault, 1 if not, 2 for wrong input, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf_ext.cli.main import CommandParser, at_least, positive, show, silence_libraries
from openrlhf_ext.config import ConfigError, RunConfig, load_config, value_of
from openrlhf_ext.inputs import did_you_mean
from openrlhf_ext.locks import LOCK, FolderLock, LockError
from openrlhf_ext.outputs import aligned, write_text
from openrlhf_ext.tools.chaos.faults import FAULTS, draw
from openrlhf_ext.tools.chaos.toy import toy
from openrlhf_ext.tools.chaos.trial import Campaign, described, run_command, summary
from openrlhf_ext.tools.chaos.watch import PHASES, abilities

_WRITES = (
    "ckpt.path",
    "ckpt.output_dir",
    "logger.metrics_path",
    "logger.figure_path",
    "logger.tensorboard_dir",
)
_NEEDS = {"root": "root, for its own namespaces", "netem": "root, and a kernel with netem"}


class Refused(ValueError):
    """Wrong input; the message has the option, the rule and the remedy."""


def main(argv: Sequence[str] | None = None) -> int:
    silence_libraries()
    words = list(sys.argv[1:] if argv is None else argv)
    run = words.pop(0) if words and not words[0].startswith("-") else None
    asked, words = _parser().parse_known_args(words)
    if asked.list:
        show(
            "\n".join(
                aligned([(f.name, f.needs or "-", f.about) for f in FAULTS.values()], str.ljust)
            )
        )
        return 0
    output, can, made = Path(asked.output).absolute(), abilities(), False
    try:
        check_order(words)
        check_free(output)
        made = not run and not any(word.split("=")[0] == "--config" for word in words)
        words = [*(toy(output / "toy") if made else ["--config", run] if run else []), *words]
        config = load_config(words)
        check_outputs(config, output)
        names = chosen(can | parts_of(config), asked.only)
    except (Refused, ConfigError) as error:
        if made:  # the next try may have the same folder
            shutil.rmtree(output / "toy", ignore_errors=True)
        show(f"chaos: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends what it has started
    url = str(config.reward.remote_url)
    command = partial(
        run_command, words, str(Path(url).absolute()) if url.endswith(".py") else None
    )
    every = config.eval.steps if config.eval.dataset else -1
    campaign = Campaign(
        command, output / "undisturbed", every, "root" in can, can_be_repeated(config)
    )
    try:
        return make_all(campaign, names, asked.seed, 60.0 * asked.minutes, output)
    except KeyboardInterrupt:
        page = output / "chaos.json"
        if page.exists():
            write_text(
                page,
                json.dumps({"interrupted": True, **json.loads(page.read_text())}, indent=1) + "\n",
            )
        found = f"results so far: {page}" if page.exists() else "no results yet"
        show(f"chaos: interrupted; {found}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("chaos", __doc__.split("\n")[0], takes_run_options=True)
    add = parser.add_argument
    add(
        "--minutes",
        type=positive,
        default=10,
        metavar="N",
        help="start no run after this many minutes (default: 10)",
    )
    add(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="S",
        help="seed for faults and phases (default: 0)",
    )
    add(
        "--output",
        default="runs/chaos",
        metavar="FOLDER",
        help="a new folder (default: runs/chaos)",
    )
    add("--only", metavar="NAME,...", help="these faults; default: all that are possible here")
    add("--list", action="store_true", help="show all faults and what they need, and end")
    return parser


def check_order(words: Sequence[str]) -> None:
    """Raises Refused: RUN.yaml comes after options, where it would be taken for a value of the
    toy's last one."""
    for before, word in zip(["", *words], words, strict=False):
        if (
            word.endswith((".yaml", ".yml"))
            and not word.startswith("-")
            and not before.startswith("-")
        ):
            raise Refused(
                f"{word} must be a single file before all options: openrlhf-ext chaos {word} "
                "--minutes ..."
            )


def check_free(output: Path) -> None:
    """Makes the folder. Raises Refused: it is in use, not empty, or cannot be made."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        inside = {path.name for path in output.iterdir()}
    except OSError as error:
        raise Refused(
            f"--output {output} cannot be a folder of runs ({error.strerror}): use a new folder"
        ) from None
    try:
        if LOCK in inside:
            FolderLock(output, take_over=False, remedy="use a new folder").close()
    except LockError as error:
        raise Refused(f"--output {output} {error}") from None
    if inside:
        raise Refused(f"--output {output} is not empty: use a new folder")


def check_outputs(config: RunConfig, output: Path) -> None:
    """Raises Refused: the run would write elsewhere than below ``output``."""
    for name in _WRITES:
        where = value_of(config, name)
        if (
            name in config.sources
            and where is not None
            and not Path(where).absolute().is_relative_to(output)
        ):
            said = f"{name} ({config.sources[name]}) is {where}, outside --output {output}"
            raise Refused(f"{said}: leave it out, because every run of chaos gets its own folders")
    if config.logger.wandb.key:
        raise Refused(
            "logger.wandb.key sends the records of disturbed runs elsewhere: leave it out"
        )


def parts_of(config: RunConfig) -> set[str]:
    """What faults may need and this run has."""
    has = {
        "reward": str(config.reward.remote_url).endswith(".py"),
        "critic": config.has_critic,
        "reward_model": config.has_reward_model,
        "frozen": config.reference_ranks > 0,
        "engine_worker": config.vllm.tensor_parallel_size > 1,
    }
    return {name for name, there in has.items() if there}


def can_be_repeated(config: RunConfig) -> bool:
    """Whether train.full_determinism_enable promises the same bits (docs/checkpoints.md)."""
    import torch

    return config.max_staleness == 0 and not torch.cuda.is_available()


def chosen(available: set[str], only: str | None) -> list[str]:
    """Names of faults, those of ``only`` or all that can happen. Raises Refused: one of them
    cannot."""
    lacking = {
        name: fault.needs for name, fault in FAULTS.items() if fault.needs not in available | {""}
    }
    if only is None:
        return sorted(FAULTS.keys() - lacking)
    names = [name.strip() for name in only.split(",") if name.strip()]
    if not names:
        raise Refused("--only names no fault: give names separated by commas; --list shows all")
    for name in names:
        if name not in FAULTS:
            raise Refused(
                f"--only: no fault {name!r}; {did_you_mean(name, FAULTS, '--list shows all')}"
            )
        if name in lacking:
            needs = _NEEDS.get(lacking[name], f"a run with {lacking[name]}")
            raise Refused(f"--only {name} needs {needs}, which is not available here: leave it out")
    return sorted({*names})


def make_all(
    campaign: Campaign, names: Sequence[str], seed: int, seconds: float, output: Path
) -> int:
    """The undisturbed run, and disturbed ones for as many seconds; 0 if everything held, else 1."""
    began = time.monotonic()
    usual_s, wrong, steps = campaign.undisturb()
    campaign, trials = dataclasses.replace(campaign, seconds=usual_s), list[dict[str, Any]]()
    show(f"undisturbed: {usual_s:.0f} s, {steps} steps; seed {seed}, {len(names)} possible faults")
    phases = [phase for phase in PHASES if phase != "evaluation" or campaign.evaluates_every > 0]
    while not wrong and (not trials or time.monotonic() - began < seconds):
        number = len(trials)
        drawn = draw(seed, number, names, steps, among=phases)
        trials.append(campaign.trial(output / f"trial{number}", drawn, restarts=number % 2))
        show("\n".join(described(trials[-1])))
        found = {"seed": seed, "undisturbed_seconds": usual_s, **summary(trials), "trials": trials}
        write_text(output / "chaos.json", json.dumps(found, indent=1) + "\n")
    if wrong:
        found = {"seed": seed, "held": False, "undisturbed": wrong}
        write_text(output / "chaos.json", json.dumps(found, indent=1) + "\n")
    said = "\n".join(wrong) or summary(trials)["sentence"]
    show(f"{said} ({output})")
    return 1 if wrong or not summary(trials)["held"] else 0


if __name__ == "__main__":
    sys.exit(main())
