"""One undisturbed run, then runs with faults, each held against it."""

from __future__ import annotations

import re
import struct
import sys
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf_ext.tools.chaos import judge
from openrlhf_ext.tools.chaos.faults import FAULTS, Drawn, NotThere
from openrlhf_ext.tools.chaos.reward import Spoiled
from openrlhf_ext.tools.chaos.watch import REMOVED, Run, is_evaluation, read_records

# so that what hangs is noticed soon
DEADLINES = {
    "vllm.hang_timeout_s": 15, "vllm.start_timeout_s": 120, "weight_sync.timeout_s": 15, "reward.timeout_s": 20,
    "megatron.collective_timeout_s": 20, "megatron.start_timeout_s": 120, "train.step_timeout_s": 60,
}  # fmt: skip
_NOTICED_S = 200.0
_ENDS_S = 420.0
_FAULT_S = 60.0
_NOTICED = ("failure", "interrupted", "engine_replaced", "restart")
_STATUSES = {0, 1, 129, 130, 137, 143, -1, -2, -9, -15}
_SAID = 300


@dataclass(frozen=True)
class Campaign:
    """``command``: of folder and extra words the command of a run there; ``undisturbed``: the
    folder of the run that nothing happened to, ``seconds`` long; ``exact``: whether the run's mode
    can be repeated to the last bit."""

    command: Callable[[Path, Sequence[str]], list[str]]
    undisturbed: Path
    evaluates_every: int = -1
    isolated: bool = False
    exact: bool = True
    seconds: float = 0.0

    def undisturb(self) -> tuple[float, list[str], int]:
        """Makes the undisturbed run: its seconds, what is wrong with it, its steps."""
        began = time.monotonic()
        status, wrong = self._start(self.undisturbed, [], [], began + _ENDS_S, [])
        if status:
            log = self.undisturbed / "log0"
            said = log.read_text(errors="replace").partition("the run failed")[2]
            short = [f"--{name} {seconds}" for name, seconds in DEADLINES.items() if name in said]
            hint = ""
            if short:
                hint = f" (chaos sets {', '.join(short)} unless they are given: give longer ones)"
            wrong.append(f"the undisturbed run ended with {status}; what it said: {log}{hint}")
        records = read_records(self.undisturbed / "run/metrics.jsonl")
        steps = max((record["step"] for record in records), default=0)
        return time.monotonic() - began, wrong, steps

    def trial(self, folder: Path, drawn: Sequence[Drawn], restarts: int) -> dict[str, Any]:
        """Starts the run, does to it what was drawn, goes on until it has ended in order, and
        judges."""
        began = time.monotonic()
        pending = list(drawn)
        rows: list[dict[str, Any]] = []
        wrong: list[str] = []
        statuses: list[int | None] = []
        while 0 not in statuses and len(statuses) < len(drawn) + 2:
            words = ["--train.max_restarts", str(restarts)]
            if statuses:
                words.append("--ckpt.load_enable")
            if statuses or restarts:
                words.append("--ckpt.fallback_enable")
            until = time.monotonic() + _ENDS_S + 2 * self.seconds + _FAULT_S * len(pending)
            status, found = self._start(folder, words, pending, until, rows)
            statuses.append(status)
            wrong += found

        exact = self.exact and all(
            FAULTS[row["fault"]].exact for row in rows if "missed" not in row
        )
        if 0 in statuses:
            wrong += judge.outcome(self.undisturbed, folder, exact)
        else:
            wrong.append(f"it did not end in order after {len(statuses)} starts")
        wrong += judge.ledger(folder)
        self._measure(rows, folder)
        rows += [asdict(missed) | {"missed": "the phase did not come"} for missed in pending]
        return {
            "faults": rows,
            "wrong": wrong,
            "left": judge.files(self.undisturbed, folder),
            "compared": "bits" if exact else "steps",
            "restarts_allowed": restarts,
            "statuses": statuses,
            "seconds": time.monotonic() - began,
            "undisturbed_seconds": self.seconds,
        }

    def _start(
        self,
        folder: Path,
        words: Sequence[str],
        pending: list[Drawn],
        until: float,
        rows: list[dict[str, Any]],
    ) -> tuple[int | None, list[str]]:
        """Starts the run once, and does to it what is ``pending``, of which the ``rows`` tell: its
        exit status, and what is wrong with that start."""
        run = Run(self.command(folder, words), folder, self.evaluates_every, self.isolated)
        try:
            while pending:
                drawn = pending[0]
                # what the last fault does is seen before the next one comes
                step = max([drawn.step, *(row["reached"] + 1 for row in rows)])
                if not run.reach(drawn.phase, step, FAULTS[drawn.fault].victim, until):
                    break
                rows.append(_inject(run, pending.pop(0)))
                if drawn.fault.endswith("_command"):  # it ends, after the step under way
                    break
            status = run.finish(until)
        finally:
            ended = run.command.poll() is not None
            if not ended:
                run.kill()
            left = run.left()
        text = run.log.read_text()
        wrong = [*judge.terminal(text), *left, *_judge_rows(rows, run, status)]
        if not ended:
            wrong.append(f"it did not end in time: {text[-_SAID:]}")
        elif status not in _STATUSES:
            wrong.append(f"exit status {status}")
        return status, wrong

    def _measure(self, rows: list[dict[str, Any]], folder: Path) -> None:
        """Adds what each fault cost."""
        records = [record for record in _all_of(folder, "metrics") if not is_evaluation(record)]
        records.sort(key=lambda record: record["time"])
        usual = _graded_by(self.undisturbed)
        for row in rows:
            if "missed" in row:
                continue
            at = row["at"]
            reached = row.pop("reached")
            noticed = at + row.get("detected_s", 0.0)  # a step that was under way is no recovery
            for later in records:
                if later["time"] > noticed and later["step"] > reached:
                    break
            else:  # there was no later step to come
                continue

            row["recovered_s"] = later["time"] - at
            times = [record["time"] for record in records if record["time"] <= at]
            calls = _calls(folder)
            graded = bisect(calls, later["time"]) - bisect(calls, max(times, default=0.0))
            needed = usual.get(later["step"], 0) - usual.get(reached, 0)
            row["samples_again"] = max(0, graded - needed)


def run_command(
    words: Sequence[str], reward: str | None, folder: Path, more: Sequence[str]
) -> list[str]:
    """Of a run in ``folder``; ``reward`` is the user's function, which is counted and spoiled
    there."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = {word.split("=")[0] for word in words}
    given: dict[str, object] = {
        name: value for name, value in DEADLINES.items() if f"--{name}" not in asked
    } | {
        "ckpt.output_dir": folder / "run",
        "ckpt.path": folder / "checkpoints",
        "ckpt.save_steps": 1,
        "logger.metrics_path": folder / "run/metrics.jsonl",
        "logger.figure_path": folder / "run/training.png",
    }
    if reward is not None:
        given["reward.remote_url"] = folder / "reward.py"
        made = f"chaos.{Spoiled.__name__}({reward!r}, {str(folder)!r})"
        (folder / "reward.py").write_text(
            f"import {Spoiled.__module__} as chaos\n\nreward_func = {made}\n"
        )
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_ppo_ray", *words]
    for option, value in given.items():
        command += [f"--{option}", str(value)]
    return [*command, "--train.full_determinism_enable", *more]


def _inject(run: Run, drawn: Drawn) -> dict[str, Any]:
    row = asdict(drawn) | {
        "at": time.time(),
        "reached": run.step,
        "log": run.log.name,
        "from": run.log.stat().st_size,
    }
    try:
        drawn.inject(run)
    except NotThere as why:
        row["missed"] = str(why)
    return row


def _judge_rows(rows: list[dict[str, Any]], run: Run, status: int | None) -> list[str]:
    """Adds to the faults of this start when the run noticed, and what came of it; returns what it
    did not say. What happens after the next fault counts as that one's."""
    wrong: list[str] = []
    events = _all_of(run.folder, "events")
    records = _all_of(run.folder, "metrics")
    here = [row for row in rows if row["log"] == run.log.name and "missed" not in row]
    for row, following in zip(here, [*here, None][1:], strict=True):
        ended = following["at"] if following else time.time()
        noticed = []
        for event in events:
            if event["event"] in _NOTICED and row["at"] < event["time"] <= ended:
                noticed.append(event)
        kinds = {event["event"] for event in noticed}
        went_on = not following or any(row["at"] < record["time"] <= ended for record in records)
        if "restart" in kinds:
            row["result"] = "restarted"
        elif status and not following:
            row["result"] = f"ended with {status}"
        elif "engine_replaced" in kinds:
            row["result"] = "engine replaced"
        else:
            row["result"] = "went on" if went_on else "overtaken by the next"
            continue

        row["detected_s"] = min([event["time"] for event in noticed], default=ended) - row["at"]
        text = run.log.read_text()[row["from"] : following["from"] if following else None]
        said = re.search(r"(?:failed:\n|replac|SIG\w+: )(?s:.{0,500})", text)
        row["said"] = said[0] if said else ""
        if row["detected_s"] > _NOTICED_S:
            wrong.append(f"{row['fault']} was noticed after {row['detected_s']:.0f} s")

        # it did not listen to signals yet
        unheard = row["phase"] == "start" and status is not None and status < 0
        own = FAULTS[row["fault"]].names
        # what an earlier fault of this start has stopped may be noticed only now
        earlier = [FAULTS[each["fault"]].names for each in here[: here.index(row)]]
        names = "|".join(filter(None, [own, *earlier]))
        if own and not unheard and not re.search(names, text):
            wrong.append(f"{row['fault']} is not named: {text[-_SAID:]}")
    return wrong


def _all_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Records, also those that were moved aside by a restart, or removed with the run folder."""
    records = []
    for kept in (REMOVED, "run"):
        for path in (folder / kept).glob(f"{name}.jsonl*"):
            records += read_records(path)
    return records


def _calls(folder: Path) -> list[float]:
    calls = folder / "calls"
    content = calls.read_bytes() if calls.exists() else b""
    return [moment for (moment,) in struct.iter_unpack("d", content[: len(content) // 8 * 8])]


def _graded_by(folder: Path) -> dict[int, int]:
    """Step -> samples that were graded when it was recorded."""
    calls = _calls(folder)
    records = read_records(folder / "run/metrics.jsonl")
    return {
        record["step"]: bisect(calls, record["time"])
        for record in records
        if not is_evaluation(record)
    }


def described(trial: Mapping[str, Any]) -> list[str]:
    """Lines for the terminal: each fault, and what did not hold."""
    lines = []
    for row in trial["faults"]:
        times = [
            f"{name} {row[f'{name}_s']:.1f} s"
            for name in ("detected", "recovered")
            if f"{name}_s" in row
        ]
        again = [f"{row['samples_again']} samples again"] if row.get("samples_again") else []
        said = row.get("missed") or ", ".join([row["result"], *times, *again])
        lines.append(f"{row['fault']:<24} {row['phase']:<11} step {row['step']:<4} {said}")
    if trial["left"]:
        lines.append(f"  left in TMPDIR: {', '.join(trial['left'])}")
    return lines + [f"  DID NOT HOLD: {wrong}" for wrong in trial["wrong"]]


def summary(trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether all held, of at least one fault; runs that nothing was done to count only if
    something was wrong.
    ``effective``: the time of undisturbed runs over that of the disturbed ones."""
    counted = []
    faults = 0
    for trial in trials:
        done = sum("missed" not in row for row in trial["faults"])
        faults += done
        if done or trial["wrong"]:
            counted.append(trial)

    failed = sum(bool(trial["wrong"]) for trial in counted)
    usual = sum(trial["undisturbed_seconds"] for trial in counted)
    effective = usual / max(1e-9, sum(trial["seconds"] for trial in counted))
    sentence = "no fault could be done to a run"
    if counted:
        sentence = (
            f"{len(counted) - failed} of {len(counted)} runs with {faults} faults held; "
            f"effective training time {effective:.0%}"
        )
    return {
        "held": faults > 0 and not failed,
        "faults": faults,
        "effective": effective,
        "sentence": sentence,
    }
