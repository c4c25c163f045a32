"""The corridor of trusted runs: for every step and metric a band, which a run of the same recipe
should not leave.

A band is made of the values that the trusted runs have at a step and its neighbors, with twice as
much room on either side as they span (of logarithms, where all are positive). A metric that is the
same in all runs at every step has neither neighbors nor room. Metrics that say how well two
computations agree may be ten times as large: rounding differs between machines.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_ext.config.show import shown_options
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.inputs import (
    INTEGER,
    MAP,
    NUMBER,
    InputError,
    check,
    decode,
    list_of,
    map_of,
    map_with,
    or_null,
    read_text,
    shown,
)
from openrlhf_ext.options import Violation
from openrlhf_ext.options.table import Configuration
from openrlhf_ext.reporting import EventLog, read_metrics
from openrlhf_ext.reporting.lines import run_options
from openrlhf_ext.reporting.names import is_documented, unit_of

logger = logging.getLogger(__name__)

# what differs between runs of a recipe: places, times, machines, layouts, and the seed
_FREE = re.compile(
    r"(ckpt|logger|profile|weight_sync)\.|dry_run|strict|.*(path|dataset|split|_url|timeout_s|max_minutes|seed|restarts|"
    r"_nodes|gpus_per_node|num_engines|min_engines|num_workers|parallel_size|virtual_pipeline_size|pipeline_num_layers|"
    r"sequence_parallel_enable|distributed_optimizer_enable|recompute.*|gradient_checkpointing_enable|overlap_.*|"
    r"bucket_size|colocate_.*|micro_batch_size|generate_batch_size|dynamic_batch_enable|max_tokens_per_gpu|"
    r"share_prompts_enable|sync_backend|enable_prefix_caching|enforce_eager|max_cudagraph_capture_size|"
    r"gpu_memory_utilization|_mib|_gib|layout|offload|enable_sleep|max_requests|max_num_.*|corridor.*|environment|head|"
    r"head_kernels|tflops|save_value_network)$"
)
_MACHINE = (
    "time",
    "time/",
    "throughput/",
    "memory/",
    "rank/",
    "offload/",
    "step",
    "label",
    "engines/",
    "packs/",
)
# of the few tokens that completions share: twenty runs do not say how far these go in another one
_RARE = ("conflict/",)
_NOT_TIME = re.compile(r".*(seconds|_seconds|tokens_per_second|weight_sync/version)$")
_AGREEMENT = re.compile(
    r"(kl/rollout|mismatch/(?!ess)|weight_sync/probe|guide/rollout|algorithm/(abs_log_ratio|policy_kl)|"
    r"advantage/group_mean)"
)
_FEWEST = 5  # of three, most clean runs leave the corridor
_ROUNDING = 1e-9
_ROOM = 2.0
_SHARE = 0.03
_SHOWN = 6
_CAUSES = (
    (
        r"kl/rollout|mismatch/(?!loss|trained|re)|weight_sync/probe|algorithm/abs_log_ratio",
        "engines sample from other weights, at another temperature or top_p, or from other "
        "tokens than the policy scores; or one of them computes in another precision",
    ),
    (
        r"kl/reference|kl/coef|algorithm/ref_kl|mismatch/reference",
        "the reference model, the coefficient of the penalty, or its estimator is another",
    ),
    (
        r"advantage/|mismatch/(loss|trained|rewards)",
        "rewards, advantages or masks are of other completions, or the loss is another",
    ),
    (r"grad_norm|loss/", "the loss is scaled, averaged or masked in another way, or lacks a term"),
    (
        r"update/|value/update",
        "learning rate, optimizer state, or what is trained, is other than it was",
    ),
    (r"lr$", "the learning rate is another, or its schedule begins anew or counts other steps"),
    (r"reward|accuracy|score|eval", "the reward function, its labels, or what is sampled"),
    (
        r"response|entropy|tokens|prompts|examples|answers",
        "the prompts, the chat template, the end-of-text token, or how is sampled",
    ),
    (r"", "the options of the method, or the data"),
)


@dataclass(frozen=True)
class Left:
    """A metric outside of its band at a step; ``value`` None: the step has none."""

    metric: str
    value: float | None
    low: float
    high: float

    @property
    def facts(self) -> dict[str, float | None]:
        finite = self.value is not None and math.isfinite(self.value)
        return {"value": self.value if finite else None, "low": self.low, "high": self.high}

    @property
    def causes(self) -> str:
        return next(causes for pattern, causes in _CAUSES if re.match(pattern, self.metric))

    def __str__(self) -> str:
        value = "missing" if self.value is None else f"{self.value:.4g}"
        return (
            f"{self.metric} is {value}, trusted runs {self.low:.4g} to {self.high:.4g} "
            f"({self.causes})"
        )


@dataclass(frozen=True)
class Corridor:
    """``options`` of the trusted runs by name, and of each metric a band (low, high) for every
    step, or None."""

    path: Path
    runs: int
    options: Mapping[str, Any]
    bands: Mapping[str, Sequence[tuple[float, float] | None]]

    def left(self, step: int, record: Mapping[str, float]) -> list[Left]:
        """What of a step's record, or of the evaluation's after it, is outside; nothing of steps
        after the trusted runs' last."""
        found = []
        # an evaluation has a record of its own: it says nothing of a step's metrics, nor a step's
        # of its
        kinds = {_is_of_evaluation(name) for name in record if is_banded(name)}
        for metric, bands in self.bands.items():
            if not 0 < step <= len(bands) or _is_of_evaluation(metric) not in kinds:
                continue
            band = bands[step - 1]
            value = record.get(metric)
            if band is not None and (value is None or not band[0] <= value <= band[1]):
                found.append(Left(metric, value, *band))
        return found

    def faults(self, config: Configuration) -> list[str]:
        """The options in which the run is of another recipe than the trusted ones."""
        # a file may be older than what is free now
        now = recipe(shown_options(config))
        # an option that the trusted runs' release did not have was what its default is
        trusted = recipe(shown_options(type(config)())) | recipe(self.options)
        return [
            f"{name} is {shown(now.get(name))}, in the trusted runs {shown(trusted.get(name))}"
            for name in sorted({*now, *trusted})
            if now.get(name) != trusted.get(name)
        ]


class CorridorLeft(RuntimeError):
    """With ``train.corridor_action fail``: a step is outside of the corridor."""


class Watch:
    """Compares the steps of a run with ``train.corridor``; says of every metric once that it left,
    and of every step in events.jsonl."""

    def __init__(self, path: str, action: str, events: EventLog) -> None:
        self._corridor = read_corridor(path)
        self._fails = action == "fail"
        self._events = events
        self._said: set[str] = set()

    def look(self, step: int, record: Mapping[str, float]) -> None:
        """Raises CorridorLeft."""
        if not (left := self._corridor.left(step, record)):
            return
        self._events.note("corridor_left", metrics={each.metric: each.facts for each in left})
        text = (
            f"step {step} is outside of the corridor of {self._corridor.runs} trusted runs "
            f"({self._corridor.path})"
        )
        if self._fails:
            raise CorridorLeft(
                "\n- ".join([f"{text}, train.corridor_action is fail:", *map(str, left)])
            )
        if new := [each for each in left if each.metric not in self._said]:
            self._said |= {each.metric for each in new}
            more = ""
            if len(new) > _SHOWN:
                more = f" and {len(new) - _SHOWN} more metrics: events.jsonl"
            logger.warning("%s:\n- %s%s", text, "\n- ".join(map(str, new[:_SHOWN])), more)


def violations(config: TrainedConfig) -> Iterator[Violation]:
    """``train.corridor`` is a corridor, and of runs of this recipe."""
    path = config.train.corridor
    if path is None:
        return
    try:
        corridor = read_corridor(path)
        faults = corridor.faults(config)
        if config.eval.dataset is None and any(map(_is_of_evaluation, corridor.bands)):
            faults.append("eval.dataset is None, and the trusted runs have bands of evaluations")
    except InputError as error:
        faults = [str(error)]
    else:
        faults = [f"{path} is of another recipe: {'; '.join(faults)}"] if faults else []
    for fault in faults:
        yield Violation(("train.corridor",), f"train.corridor: {fault}")


def recipe(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the shown options that a run's numbers follow from."""
    return {name: value for name, value in options.items() if not _FREE.match(name)}


def read_corridor(path: str | Path) -> Corridor:
    """Raises InputError: the file is none that ``openrlhf-ext report`` wrote, or has metrics of
    another version."""
    where = str(path)
    remedy = "make it anew: openrlhf-ext report RUN RUN ... --write_corridor FILE"
    numbers = list_of(or_null(NUMBER))
    band = map_with({"low": numbers, "high": numbers})
    kinds = {"runs": INTEGER, "steps": INTEGER, "options": MAP, "bands": map_of(band)}
    try:
        content = decode(read_text(path), where)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error
    found = check(content, where, kinds, remedy=remedy)
    steps = found["steps"]
    unknown = []
    upside_down = []
    bands = {}
    for name, sides in found["bands"].items():
        if not len(sides["low"]) == len(sides["high"]) == steps:
            raise InputError(
                f"{where}: a band must have as many numbers as there are steps, {steps}; {remedy}"
            )
        if not (is_documented(name) and is_banded(name)):
            unknown.append(name)
        pairs = zip(sides["low"], sides["high"], strict=True)
        bands[name] = [None if None in pair else pair for pair in pairs]
        if any(pair and pair[0] > pair[1] for pair in bands[name]):
            upside_down.append(name)
    if unknown:
        raise InputError(
            f"{where} has bands of {', '.join(unknown[:5])}, which are not measured any more; "
            f"{remedy}"
        )
    if upside_down:
        raise InputError(
            f"{where}: low is above high in the bands of {', '.join(upside_down[:5])}; {remedy}"
        )
    if found["runs"] < _FEWEST or not any(map(any, bands.values())):
        raise InputError(f"{where} has bands of no step, or of less than {_FEWEST} runs; {remedy}")
    return Corridor(Path(path), found["runs"], found["options"], bands)


def make_corridor(folders: Sequence[Path]) -> dict[str, Any]:
    """Of the run folders of trusted runs, as JSON. Raises InputError: there are less than five, one
    is no whole run, or their options or steps are not those of the first."""
    if (count := len({folder.resolve() for folder in folders})) < max(_FEWEST, len(folders)):
        raise InputError(
            f"a corridor needs at least {_FEWEST} trusted runs (twenty are better), each once; "
            f"got {count} of {len(folders)} folders"
        )
    options = recipe(_options(folders[0]))
    runs = [_by_step(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        theirs = recipe(_options(folder))
        if other := [
            name for name in sorted({*options, *theirs}) if options.get(name) != theirs.get(name)
        ]:
            raise InputError(
                f"{folder} is a run of another recipe than {folders[0]}: {', '.join(other)} differ"
            )
        if run.keys() != runs[0].keys():
            raise InputError(
                f"{folder} has {len(run)} steps, {folders[0]} has {len(runs[0])}: trust whole "
                "runs only"
            )
        if not run or run.keys() != {*range(1, len(run) + 1)}:
            raise InputError(
                f"{folder / 'metrics.jsonl'} lacks steps: it has {len(run)}, up to "
                f"{max(run, default=0)}"
            )

    steps = max(runs[0])
    sides = {}
    for name in filter(is_banded, sorted(set().union(*runs[0].values()))):
        bands = bands_of(name, runs, steps)
        if any(bands):
            sides[name] = {
                "low": [band and band[0] for band in bands],
                "high": [band and band[1] for band in bands],
            }
    return {"runs": len(runs), "steps": steps, "options": options, "bands": sides}


def _is_of_evaluation(metric: str) -> bool:
    return metric.startswith("eval")


def is_banded(metric: str) -> bool:
    return not metric.startswith((*_MACHINE, *_RARE)) and not _NOT_TIME.match(metric)


def _options(folder: Path) -> Mapping[str, Any]:
    """With which it started last. Raises InputError: it did not end in order."""
    path = folder / "events.jsonl"
    starts, last = run_options(path)
    if not starts:
        raise InputError(f"{path} tells of no start: {folder} is not the folder of a run")
    if last != "end":
        raise InputError(f"{path} tells of no end in order: trust whole runs only")
    return starts[-1]


def _by_step(folder: Path) -> dict[int, dict[str, float]]:
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for record in read_metrics(folder / "metrics.jsonl"):
        if record["step"] > 0:
            steps[record["step"]] |= {
                name: value for name, value in record.items() if not isinstance(value, str)
            }
    return dict(steps)


def bands_of(
    metric: str, runs: Sequence[Mapping[int, Mapping[str, float]]], steps: int
) -> list[tuple[float, float] | None]:
    """Of every step; None where not all runs have the metric. ``runs``: records by step."""
    whole: list[list[float]] = []  # of every step; empty where a run has no number
    for step in range(1, steps + 1):
        values = [run[step][metric] for run in runs if metric in run.get(step, {})]
        if len(values) < len(runs) or not all(map(math.isfinite, values)):
            values = []
        whole.append(values)

    # what is the same in all runs at every step is not like it is at other steps: a learning rate,
    # a count; at one step alone runs agree by chance
    reach = int(any(len({*each}) > 1 for each in whole))
    signed = any(min(each, default=0.0) < 0 for each in whole)
    bands: list[tuple[float, float] | None] = [None] * steps
    for place, each in enumerate(whole):
        if each:
            near = whole[max(0, place - reach) : place + reach + 1]
            bands[place] = _band(metric, sum(near, []), signed)
    return bands


def _band(metric: str, values: Sequence[float], signed: bool) -> tuple[float, float]:
    """``signed``: the metric was negative at some step; it may be at those where it was not."""
    least, most = min(values), max(values)
    if _AGREEMENT.match(metric):
        bound = max(10 * max(most, -least), _ROUNDING)
        return -bound, bound
    if least > _ROUNDING and not signed:  # logarithms of rounding span everything
        room = _ROOM * math.log(most / least) + 1e-6
        low = least * math.exp(-room)
        high = most * math.exp(room)
    else:
        room = _ROOM * (most - least) + _ROUNDING
        low = least - room
        high = most + room
    # of shares, and of what a user counts: a sample more or less where the trusted runs had none
    share = _SHARE * max(1.0, abs(most)) if unit_of(metric) in ("fraction", "") else 0.0
    return min(low, least - share), max(high, most + share)


def written(corridor: Mapping[str, Any]) -> str:
    return json.dumps(corridor, sort_keys=True) + "\n"
