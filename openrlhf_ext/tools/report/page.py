"""From runs to the numbers that the page draws, and the page: one HTML file that asks for nothing
else.

The page is ``page.html`` with one block of JSON; what is in it is made here, drawn there.
"""

from __future__ import annotations

import heapq
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from openrlhf_ext.inputs import (
    INTEGER,
    MAP,
    NUMBER,
    TEXT,
    TEXT_OR_INTEGER,
    InputError,
    Kind,
    check,
    list_of,
    or_null,
    similar_path,
)
from openrlhf_ext.redaction import redacted
from openrlhf_ext.reporting import METRICS, Metric, read_metrics
from openrlhf_ext.reporting.lines import Record, read_lines
from openrlhf_ext.reporting.progress import SMOOTHED_FROM, moving_mean, smoothing_window
from openrlhf_ext.reporting.starts import Start, starts_of
from openrlhf_ext.run.ledger import LEDGER, Audit

_ENDS = {"end": "finished", "failure": "failed", "interrupted": "interrupted"}
_BEGINS = {"start", "restart", "resumed"}
# what the page needs of the lines of events.jsonl and samples.jsonl, and what they may have
_EVENT = {"event": TEXT, "step": INTEGER, "time": NUMBER}
_FACTS = {
    **dict.fromkeys(("options", "versions", "hardware", "layout", "processes"), MAP),
    "set": list_of(TEXT),
    **dict.fromkeys(("steps", "filtered", "late", "unstarted", "count"), INTEGER),
    **dict.fromkeys(("accuracy", "stderr", "score", "over_mean"), NUMBER),
}
_SAMPLE = {"step": INTEGER, "group": TEXT_OR_INTEGER, "tokens": list_of(TEXT)}
_TOKEN_NUMBERS = (
    "logprobs", "rollout_logprobs", "entropies", "advantages", "loss_mask", "token_weights",
)  # fmt: skip
_TOKEN_INTEGERS = ("environment", "token_ids")
_NUMBERS = {
    **dict.fromkeys(_TOKEN_NUMBERS, list_of(or_null(NUMBER))),
    **dict.fromkeys(_TOKEN_INTEGERS, list_of(INTEGER)),
    "updates": INTEGER,
    "prompt": TEXT,
    "reward": NUMBER,
    "score": or_null(NUMBER),
}


@dataclass(frozen=True)
class Run:
    """One run; ``name``: its folder's, made unique among the runs of a page; ``missing``: what the
    folder does not hold or what of it cannot be read, as sentences; ``ledger``: what became of its
    prompts, likewise."""

    name: str
    folder: Path
    records: list[Record]
    events: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    held_out: list[Record] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Record]:
        """The records of training steps."""
        return [record for record in self.records if "time/step" in record]

    def last_event(self, kind: str) -> Record:
        """The last event of a kind; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == kind), {})

    @property
    def start(self) -> Record:
        """The last event of a start: options, versions, hardware, layout."""
        return self.last_event("start")

    def values_of(self, option: str) -> list[str]:
        """An option's value; of starts that have other values each with its steps; empty: no start
        has it."""
        starts = [start for start in self.starts if option in start.options]
        texts = [
            json.dumps(start.options[option], ensure_ascii=False).strip('"') for start in starts
        ]
        if len({*texts}) < 2:
            return texts[:1]
        return [f"{text} ({start.steps})" for text, start in zip(texts, starts, strict=True)]

    @cached_property
    def starts(self) -> list[Start]:
        return starts_of(self.events)

    @property
    def state(self) -> str:
        """``finished``, ``failed``, ``interrupted``, ``no end`` (it goes on, or was killed), or
        ``unknown``."""
        if not self.events:
            return "unknown"
        for event in reversed(self.events):
            kind = event["event"]
            if kind in _ENDS:
                return _ENDS[kind]
            if kind in _BEGINS:
                break
        return "no end"


def read_runs(folders: list[Path]) -> list[Run]:
    """The runs of these folders, in order; InputError names all whose metrics.jsonl is not there,
    or cannot be read."""
    runs, faults = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        try:
            runs.append(_read_run(folder, name))
        except InputError as error:
            faults.append(str(error))
    if faults:
        raise InputError("\n".join(faults))
    return runs


def _names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    paths = [folder.resolve() for folder in folders]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def _read_run(folder: Path, name: str) -> Run:
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        if folder.is_file():
            there = "it is a file"
        elif folder.is_dir():
            there = "it holds no metrics.jsonl"
        else:
            there = f"there is no such folder{similar_path(folder)}"
        raise InputError(
            f"{folder} is not the folder of a run: {there}; give the folder of logger.metrics_path"
        )

    missing: list[str] = []
    records = read_metrics(metrics)
    if not records:
        missing.append("metrics.jsonl is still empty: there are no curves yet.")
    without = "no events, configuration, versions and hardware, and whether it ended is not known"
    events = _optional(folder / "events.jsonl", _EVENT, _FACTS, missing, without)
    samples = _optional(folder / "samples.jsonl", _SAMPLE, _NUMBERS, missing, "no completions")
    held_out = []
    evaluated = folder / "eval_samples.jsonl"
    # earlier releases wrote none; it is empty before the first evaluation
    if evaluated.is_file() and evaluated.stat().st_size:
        without = "no held-out completions"
        held_out = _optional(evaluated, _SAMPLE, _NUMBERS, missing, without)
    ledger = _ledger(folder / LEDGER, missing)
    # earlier releases wrote passwords down
    return Run(name, folder, records, redacted(events), samples, held_out, missing, ledger)


def _ledger(path: Path, missing: list[str]) -> list[str]:
    """What the check says; nothing of runs that have no ledger: supervised ones and those of
    earlier releases."""
    if not path.exists():
        return []
    try:
        audit = Audit(path)
    except InputError as error:
        missing.append(f"{error}: what became of the prompts is not known.")
        return []
    return [*audit.lines, *audit.faults[:_LISTED_FAULTS]]


def _optional(
    path: Path,
    required: Mapping[str, Kind],
    optional: Mapping[str, Kind],
    missing: list[str],
    without: str,
) -> list[Record]:
    """Objects of a file that older runs do not have; what is wrong with it goes into
    ``missing``."""
    if not path.is_file():
        missing.append(f"The folder holds no {path.name}: {without}.")
        return []
    found, faults = [], []
    try:
        for number, record in read_lines(path):
            try:
                found.append(check(record, f"line {number}", required, optional))
            except InputError as error:
                faults.append(str(error))
    except InputError as error:
        missing.append(f"{error}: {without}.")
        return []
    if faults:
        missing.append(
            f"{path.name} has lines that cannot be used and are left out: {len(faults)}, first "
            f"{faults[0]}."
        )
    elif not found:
        missing.append(f"{path.name} is empty: {without}.")
    return found


# ---- the page

BUCKETS = 150
"""Of a curve: the smallest and the largest value of each are drawn."""
_SAMPLED_TOKENS = 45_000  # of the page; some 60 bytes each
# of a completion: those of its beginning and of its end, and the worst with those around them
_COMPLETION_TOKENS, _FIRST_TOKENS, _LAST_TOKENS = 600, 300, 60
_WORST, _AROUND = 5, 5
_LISTED_EVENTS, _LISTED_FAULTS = 300, 20
_HEADLINE_STEPS = 3  # at least, where the run has twelve
_HEADLINES = (
    "reward/mean",
    "accuracy/mean",
    "eval/accuracy",
    "eval/score_mean",
    "entropy/mean",
    "response/length_mean",
    "rollout/bit_equal",
    "loss/sft",
    "eval/loss",
    "time/step",
)
_KEY_CURVES = (
    "reward/mean", "accuracy/mean", "eval/accuracy", "score/mean", "eval/score_mean", "entropy/mean",
    "entropy/completion_mean", "response/length_mean", "kl/rollout", "rollout/bit_equal", "rollout/accepted",
    "loss/policy", "loss/sft", "eval/loss", "grad_norm", "throughput/tokens_per_second",
)  # fmt: skip
_SCORES = {"score/mean": "accuracy/mean", "eval/score_mean": "eval/accuracy"}
_LEVELS = {"entropy/completion_mean": [math.log(2), "ln 2"]}  # marked on a curve
_AT_K = re.compile(r"eval/(?:(?P<set>.+)/)?(?P<kind>pass|maj)@(?P<k>[0-9]+)")
_PHASES = ("generate", "grade", "logprob", "shape", "train", "sync")
_STREAMED_PHASES = ("wait_rollouts", "logprob", "shape", "train", "sync")
_NO_OPTION = "no such option"
_COUNTED = {"groups_dropped", "groups_late"}
_MEANINGS = {metric.name: metric for metric in METRICS}
Points = list[list[float | None]]
Numbers = Sequence[float]


def write_page(
    runs: Sequence[Run], smooth: int | None = None, now: Callable[[], float] = time.time
) -> str:
    """The page as text; ``smooth``: steps of the moving mean, None = a twentieth of the longest
    run, 1 = none."""
    data = json.dumps(
        page_data(runs, smooth, now), allow_nan=False, separators=(",", ":"), ensure_ascii=False
    )
    # a completion may hold </script>, and line separators that are line ends to older parsers
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = (files("openrlhf_ext.tools.report") / "page.html").read_text(encoding="utf-8")
    return template.replace("{{DATA}}", data.encode("utf-8", "replace").decode())


def page_data(runs: Sequence[Run], smooth: int | None, now: Callable[[], float]) -> Record:
    longest = max((len(run.steps) for run in runs), default=0)
    window = smooth if smooth is not None else smoothing_window(longest)
    names = curve_names(runs)
    budget = _SAMPLED_TOKENS // len(runs)
    return {
        "made": now(),
        "window": window,
        "buckets": BUCKETS,
        "runs": [_run(run, window, now()) for run in runs],
        "charts": [_chart(name, runs, window) for name in names],
        "key": _key_curves(names),
        "at_k": _at_k(runs),
        "at_k_curves": [name for name in names if _AT_K.fullmatch(name)],
        "phases": [_phases(run) for run in runs],
        "ranks": [_ranks(run) for run in runs],
        "events": [_events(run) for run in runs],
        "options": _options(runs),
        "facts": _facts(runs),
        "samples": [_samples(run, budget) for run in runs],
        "profile": [_profile(run) for run in runs],
        "ledgers": [run.ledger for run in runs],
    }


def _run(run: Run, window: int, now: float) -> Record:
    times = [record["time"] for record in (*run.records, *run.events) if "time" in record]
    steps = run.steps
    labels = [record["label"] for record in run.records if record.get("label")]
    options = run.start.get("options", {})
    model = options.get("actor.model_name_or_path") or options.get("model.model_name_or_path")
    about = [*run.values_of("algo.advantage.estimator"), model]

    numbers = []
    for name in _HEADLINES:
        if name in _SCORES and not _is_graded(run, name):
            continue
        if number := _first_and_last(run, name, window):
            numbers.append(number)

    return {
        "name": run.name,
        "state": run.state,
        "about": ", ".join(str(part).rstrip("/").rsplit("/", 1)[-1] for part in about if part),
        "step": steps[-1]["step"] if steps else 0,
        "of": run.last_event("ready").get("steps"),
        "seconds": max(times) - min(times) if times else 0,
        "silent": now - max(times) if times else None,
        "label": labels[-1] if labels else "",
        "missing": run.missing,
        "clock": _clock(run),
        "numbers": numbers,
        "failure": run.last_event("failure").get("error") if run.state == "failed" else None,
    }


def _clock(run: Run) -> Points:
    """[step, seconds since the run's first line] at some steps: the time between them is
    interpolated."""
    times = {record["step"]: record["time"] for record in run.records if "time" in record}
    begin = min([*times.values(), *(event["time"] for event in run.events)], default=0.0)
    return thinned(list(times), [seconds - begin for seconds in times.values()])


def _first_and_last(run: Run, name: str, window: int) -> Record | None:
    """Means of the first and of the last values of a metric, which single steps would not tell;
    None without values.

    A held-out accuracy or mean score has its standard error instead.
    """
    present = [record for record in run.records if name in record]
    if not present:
        return None
    error = f"{name}_stderr"
    stderr = _number(present[-1].get(error, math.nan))
    count = 1
    if error not in present[-1]:
        # of a short run at most a quarter on either side: otherwise the first and the last would be
        # the same steps
        count = max(1, min(max(window, _HEADLINE_STEPS), len(present) // 4))
    values = [record[name] for record in present]
    first = _number(moving_mean(values[:count], count)[-1])
    last = _number(moving_mean(values[-count:], count)[-1])
    return {"name": name, "first": first, "last": last, "of": count, "stderr": stderr}


# ---- curves


def curve_names(runs: Sequence[Run]) -> list[str]:
    """Metrics of any run in the order of docs/metrics.md; those of single ranks have a place of
    their own."""
    present: set[str] = set()
    for run in runs:
        present.update(*run.records)
    present -= {"step", "time", "label"}
    for score in _SCORES:
        if not any(_is_graded(run, score) for run in runs):
            present.discard(score)
    order = {metric.name: place for place, metric in enumerate(METRICS)}

    def key(name: str) -> tuple[Any, ...]:
        metric = _metric_of(name)
        where = order[metric.name] if metric else len(order)
        if found := _AT_K.fullmatch(name):  # pass@16 behind pass@2
            return where, found["set"] or "", int(found["k"])
        return where, name, 0

    shown = [name for name in present if not (name.startswith("rank/") and name.count("/") > 1)]
    return sorted(shown, key=key)


def _is_graded(run: Run, score: str) -> bool:
    """Whether a mean score is another number than the accuracy of the same completions."""
    return any(
        score in record and record[score] != record.get(_SCORES[score]) for record in run.records
    )


def _metric_of(name: str) -> Metric | None:
    """The metric of that name; of a named held-out set (``eval/NAME/accuracy``) that of the metric;
    of a family."""
    plain = f"eval/{name.rpartition('/')[2]}" if name.startswith("eval/") else name
    for known in (name, plain, f"{plain.partition('@')[0]}@*", f"{name.partition('/')[0]}/*"):
        if known in _MEANINGS:
            return _MEANINGS[known]
    return None


def _key_curves(names: Sequence[str]) -> list[str]:
    """The curves in front, the accuracy of each named held-out set behind the mean of them."""
    sets = [name for name in names if re.fullmatch("eval/[^/]*/accuracy", name)]
    place = _KEY_CURVES.index("eval/accuracy") + 1
    keys = (*_KEY_CURVES[:place], *sets, *_KEY_CURVES[place:])
    return [name for name in keys if name in names]


def _at_k(runs: Sequence[Run]) -> list[Record]:
    """pass@k and maj@k over k of each held-out set, in the first and in the last evaluation of each
    run."""
    plots: dict[tuple[str, str], list[Record]] = {}
    for number, run in enumerate(runs):
        points: dict[tuple[str, str], dict[int, Points]] = {}  # of each plot, by step
        for record in run.records:
            for name, value in record.items():
                if found := _AT_K.fullmatch(name):
                    by_step = points.setdefault((found["set"] or "", found["kind"]), {})
                    of_step = by_step.setdefault(record["step"], [])
                    of_step.append([int(found["k"]), _number(value)])

        for plot, by_step in points.items():
            first, last = min(by_step), max(by_step)
            for step in dict.fromkeys((first, last)):
                plots.setdefault(plot, []).append(
                    {
                        "run": number,
                        "step": step,
                        "first": step == first != last,
                        "points": sorted(by_step[step]),
                    }
                )

    return [
        {
            "title": f"{kind}@k of {of}" if of else f"{kind}@k",
            "lines": lines,
            "name": f"eval/{of}/{kind}@k" if of else f"eval/{kind}@k",
        }
        for (of, kind), lines in plots.items()
    ]


def _chart(name: str, runs: Sequence[Run], window: int) -> Record:
    metric = _metric_of(name)
    return {
        "name": name,
        "level": _LEVELS.get(name),
        "unit": metric.unit if metric else "",
        "meaning": metric.meaning.replace("`", "") if metric else "",
        "lines": [_line(run, name, window) for run in runs],
    }


def _line(run: Run, name: str, window: int) -> Record:
    """A curve's points; where the run tells their standard errors, these instead of a moving
    mean."""
    steps = []
    values = []
    error = f"{name}_stderr"
    errors = {}
    for record in run.records:
        if name in record:
            steps.append(record["step"])
            values.append(record[name])
            if error in record:
                errors[record["step"]] = _number(record[error])

    raw = thinned(steps, values)
    if errors:
        return {"raw": [[step, value, errors.get(step)] for step, value in raw], "smooth": []}
    smooth: Points = []
    if 1 < window < len(values) and len(values) >= SMOOTHED_FROM:
        smooth = thinned(steps, moving_mean(values, window), BUCKETS // 2)
    return {"raw": raw, "smooth": smooth}


def thinned(steps: Sequence[int], values: Numbers, buckets: int = BUCKETS) -> Points:
    """[step, value] of the smallest and the largest value in each of ``buckets`` equal parts, and
    of both ends.

    A curve with no more points than that stays as it is. What is not finite is null, a gap.
    """
    places: Iterable[int] = range(len(values))
    if len(values) > 2 * buckets:
        size = len(values) / buckets
        chosen = {0, len(values) - 1}
        for part in range(buckets):
            chosen.update(_ends(range(int(part * size), int((part + 1) * size)), values))
        places = sorted(chosen)
    return [[steps[place], _number(values[place])] for place in places]


def _ends(part: range, values: Numbers) -> list[int]:
    finite = [place for place in part if math.isfinite(values[place])]
    if not finite:
        return [part.start]
    return sorted({min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)})


def _number(value: float) -> float | None:
    """Five digits are more than a screen shows."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


# ---- phases, ranks


def _phases(run: Run) -> Record:
    """Mean seconds of each phase in up to ``BUCKETS`` parts of the run, and over all of it."""
    steps = run.steps
    busy = sum(sum(_seconds(step, _PHASES)) for step in steps)
    streams = busy > 1.05 * sum(step["time/step"] for step in steps)
    names = _STREAMED_PHASES if streams else _PHASES
    rows = []
    for step in steps:
        # in a streaming run the wait for the sync is a part of time/sync, and nothing else overlaps
        seconds = _seconds(step, names)
        rows.append([*seconds, max(0.0, step["time/step"] - sum(seconds))])

    size = max(1, math.ceil(len(rows) / BUCKETS))
    starts = range(0, len(rows), size)
    return {
        "names": [*names, "other"],
        "streams": streams,
        "steps": [steps[start]["step"] for start in starts],
        "rows": [_means(rows[start : start + size]) for start in starts],
        "mean": _means(rows),
    }


def _seconds(step: Record, phases: Sequence[str]) -> list[float]:
    return [step.get(f"time/{phase}", 0.0) for phase in phases]


def _means(rows: Sequence[Numbers]) -> list[float | None]:
    return [_number(sum(column) / len(rows)) for column in zip(*rows, strict=True)]


def _ranks(run: Run) -> list[Record]:
    """Peak memory and own time by rank, from the last record that has them."""
    last: Record = {}
    for record in reversed(run.records):
        if any(name.startswith("rank/0/") for name in record):
            last = record
            break
    parts = (name.split("/") for name in last if name.startswith("rank/"))
    numbers = {part[1] for part in parts if len(part) == 3 and part[1].isdecimal()}

    ranks = []
    for rank in sorted(numbers, key=int):
        own = f"rank/{rank}"
        memory = last.get(f"{own}/memory_gib", math.nan)
        seconds = last.get(f"{own}/time_logprob", 0.0) + last.get(f"{own}/time_train", 0.0)
        ranks.append({"rank": int(rank), "memory": _number(memory), "seconds": _number(seconds)})
    return ranks


def _profile(run: Run) -> list[Record]:
    shown = ("step", "rank", "seconds", "wall", "trace", "host")
    profiles = []
    for event in run.events:
        if event["event"] == "profile":
            profiles.append({name: event[name] for name in shown if name in event})
    return profiles


# ---- events, options


def _events(run: Run) -> Record:
    """Events to be listed, newest last; groups that were dropped or late are many, and are added
    up."""
    listed = [event for event in run.events if event["event"] not in _COUNTED]
    counts: Counter[str] = Counter()
    for event in run.events:
        if event["event"] in _COUNTED:
            for name in ("filtered", "late", "unstarted", "skipped", "count"):
                kind = "trained late" if name == "count" else f"dropped, {name}"
                counts[kind] += event.get(name, 0)
    return {
        "left_out": max(0, len(listed) - _LISTED_EVENTS),
        "counts": {kind: count for kind, count in counts.items() if count},
        "list": [
            {"kind": e["event"], "step": e["step"], "time": e["time"], "text": _facts_text(e)}
            for e in listed[-_LISTED_EVENTS:]
        ],
    }


def _facts_text(event: Record) -> str:
    """An event's facts in one line; those of a start have tables of their own."""
    fact = event.get
    match event["event"]:
        case "start":
            return f"to resume from step {event['resume_step']}" if fact("resume_step") else ""
        case "ready":
            return f"{len(fact('processes', ()))} processes, {fact('steps')} steps"
        case "resumed":
            return f"from step {fact('resume_step')}, {fact('path')}"
        case "evaluation":
            text = f"accuracy {fact('accuracy', math.nan):.3f} ± {fact('stderr', math.nan):.3f}"
            if fact("score", fact("accuracy")) != fact("accuracy"):
                text += f", mean score {event['score']:.3f}"
            return text
        case "failure":
            return _short(fact("error"))
        case "restart":
            return f"{fact('number')} of at most {fact('most')}"
        case "profile":
            return f"rank {fact('rank')}, {fact('trace')} on {fact('host')}"
        case "slow_rank":
            times = f"{fact('over_mean', math.nan):.1f} times the mean"
            return f"policy rank {fact('rank')} on {fact('host')}, {times}"
    facts = {key: value for key, value in event.items() if key not in ("event", "step", "time")}
    return _short(facts)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(inner)}" for key, inner in value.items())
    text = str(value)
    return text if len(text) <= 2000 else text[:2000] + " ..."


def _options(runs: Sequence[Run]) -> list[Record]:
    options = [run.start.get("options", {}) for run in runs]
    given = set(chain.from_iterable(run.start.get("set", ()) for run in runs))
    rows = []
    for name in dict.fromkeys(chain.from_iterable(options)):
        found = [run.values_of(name) for run in runs]
        values = [
            ", ".join(one) or (_NO_OPTION if of else None)
            for one, of in zip(found, options, strict=True)
        ]
        is_set = any(key == name or key.startswith(f"{name}.") for key in given)
        differs = len({*chain(*found)}) > 1 or (is_set and _NO_OPTION in values)
        rows.append({"name": name, "values": values, "differs": differs, "set": is_set})
    return rows


def _facts(runs: Sequence[Run]) -> list[Record]:
    rows = []
    for part in ("layout", "hardware", "versions"):
        facts = [run.start.get(part, {}) for run in runs]
        for name in dict.fromkeys(chain.from_iterable(facts)):
            values = [_fact(one[name]) if name in one else None for one in facts]
            differs = len(set(values) - {None}) > 1
            rows.append({"part": part, "name": name, "values": values, "differs": differs})
    return rows


def _fact(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


# ---- completions


def _samples(run: Run, budget: int) -> Record:
    """Groups of completions of as many steps and evaluations as the budget of tokens holds."""
    steps: list[Record] = []
    left_out = 0
    for held_out, samples in ((True, run.held_out), (False, run.samples)):
        by_step: dict[int, list[Record]] = {}
        for sample in samples:
            by_step.setdefault(sample["step"], []).append(sample)
        chosen = _chosen(by_step, budget // 2 if held_out else budget)
        budget -= sum(chosen.values())
        left_out += len(by_step) - len(chosen)
        steps += [
            {"step": step, "held_out": held_out, "groups": _groups(by_step[step])}
            for step in chosen
        ]
    steps.sort(key=lambda entry: (entry["step"], entry["held_out"]))
    return {"left_out": left_out, "steps": steps}


def _chosen(by_step: Mapping[int, Sequence[Record]], budget: int) -> dict[int, int]:
    """The last step, the first, some between, each with its number of tokens."""
    sizes = {
        step: sum(min(len(sample["tokens"]), _COMPLETION_TOKENS) for sample in by_step[step])
        for step in sorted(by_step)
    }
    steps = list(sizes)
    for stride in range(1, len(steps) + 1):
        chosen = sorted({steps[0], *steps[::-1][::stride]})
        if sum(sizes[step] for step in chosen) <= budget:
            break
    else:
        chosen = steps[-1:]
    return {step: sizes[step] for step in chosen}


def _groups(samples: Sequence[Record]) -> list[Record]:
    by_group: dict[str, list[Record]] = {}
    for sample in samples:
        by_group.setdefault(str(sample["group"]), []).append(sample)
    return [_group(name, group) for name, group in by_group.items()]


def _group(name: str, samples: Sequence[Record]) -> Record:
    return {
        "name": name,
        "prompt": samples[0].get("prompt", ""),
        "label": _label(samples[0].get("label")),
        "completions": list(map(_completion, samples)),
    }


def _completion(sample: Record) -> Record:
    """Its numbers of tokens have the names of the file; the page makes colors of them."""
    length, places = len(sample["tokens"]), _places(sample)
    numbers = {
        key: [sample[key][place] for place in places if place < len(sample[key])]
        for key in ("tokens", *_TOKEN_NUMBERS, *_TOKEN_INTEGERS)
        if key in sample
    }
    return numbers | {
        "reward": _number(sample.get("reward", math.nan)),
        "score": sample.get("score"),
        "truncated": bool(sample.get("truncated")),
        "guide": bool(sample.get("from_guide")),
        "updates": sample.get("updates", 0),
        "length": length,
        "places": None if len(places) == length else places,
    }


def _places(sample: Record) -> list[int]:
    """Which tokens of a completion the page shows: its beginning, its end, and its worst ones with
    those around them; what is not finite is the worst."""
    policy, engine = sample.get("logprobs", []), sample.get("rollout_logprobs", [])
    gaps = [
        None if None in pair else pair[0] - pair[1] for pair in zip(policy, engine, strict=False)
    ]
    near: set[int] = set()
    for row in (gaps, engine, sample.get("entropies", []), sample.get("advantages", [])):
        sizes = [math.inf if value is None else abs(value) for value in row]
        for worst in heapq.nlargest(_WORST, range(len(sizes)), key=sizes.__getitem__):
            near.update(range(worst - _AROUND, worst + _AROUND + 1))
    length = len(sample["tokens"])
    near.update(range(_FIRST_TOKENS), range(length - _LAST_TOKENS, length))
    best = sorted(range(length), key=lambda place: place not in near)
    return sorted(best[:_COMPLETION_TOKENS])


def _label(value: Any) -> str | None:
    """What the reward function compared with; None where a run does not tell."""
    if value is None or isinstance(value, str):
        return value or None
    return json.dumps(value, ensure_ascii=False)
