"""What a study is: tasks, cells (methods with their options), contrasts between them, read from a
YAML file.

A cell is a training run: its options are those of ``train_ppo_ray``, checked by the same rules.
Cells with several learning rates have an arm for each; an arm on one seed is a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from benchmarks.study.outcomes import OUTCOMES, is_outcome
from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.config import ConfigError, RunConfig, build_config
from openrlhf_ext.config.estimator import algorithm_options
from openrlhf_ext.config.load import ConfigLoader, flattened
from openrlhf_ext.inputs import InputError, nearest, read_text, reading

LEARNING_RATE = "actor.adam.lr"
_GIVEN_BY_THE_STUDY = (
    "actor.model_name_or_path",
    "data.prompt_dataset",
    "data.max_samples",
    "eval.dataset",
    "eval.steps",
    "eval.n_samples_per_prompt",
    "eval.temperature",
    "train.seed",
    "train.num_episodes",
    "ckpt.output_dir",
    "logger.metrics_path",
    "logger.samples_every",
    "logger.samples_groups",
)
# what a run in one process reads; the rest would be ignored, so that a study may not set it
_READ = re.compile(
    r"actor\.(adam\..*|max_norm|lr_scheduler|lr_warmup_ratio|lr_warmup_steps|eps_clip|eps_clip_low_high|dual_clip|"
    r"loss_agg_mode)|algo\.advantage\.(estimator|no_std_norm)|algo\.kl\.(init_coef|estimator|use_loss|unbiased_gradient)|"
    r"algo\.(?!advantage\.|kl\.|dynamic|module|gae\.|mixed)\w+\..*|algo\.module_path|data\.(input_key|label_key)|"
    r"reward\.(remote_url|overlong_buffer_len|overlong_penalty_factor|length_penalty\..*)|"
    r"rollout\.(batch_size|n_samples_per_prompt|max_new_tokens|temperature|micro_batch_size)|"
    r"train\.(batch_size|micro_batch_size|max_epochs)"
)
_KNOWN_OUTCOMES = f"one of {', '.join(OUTCOMES)}, or start/NAME or last/NAME"
_SCHEDULES = ("constant", "constant_with_warmup")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Evaluation(_Part):
    """How held-out problems are sampled during a run: before the first step, every so many, after
    the last one."""

    every: PositiveInt = 10  # steps
    problems: PositiveInt = 128
    # of the evaluation after the last step; with backend stack of every one
    last_problems: PositiveInt = 512
    samples: PositiveInt = 16  # completions of each problem


class Gate(_Part):
    """What must be the case for a claim to be testable: an outcome within bounds, in a share of the
    runs."""

    name: str
    outcome: str
    low: float | None = None
    high: float | None = None
    share: float = Field(1.0, gt=0, le=1)  # of runs, at least
    arms: Literal["all", "first", "second"] = "all"  # of a contrast's two


class Task(_Part):
    """What is learned, and how long.

    Attributes:
        maker: Python script with its options; called with
        ``--seed S --output_dir POLICY --data_dir DATA`` it writes a
            checkpoint, and ``train.jsonl`` and ``heldout.jsonl``. Instead of it: ``policy``,
            ``train``, ``heldout``.
        environment: variables of the runs, such as those that a reward file reads.
        short_tokens: a completion of at most so many tokens is short.
        gates: for every contrast on this task.
    """

    maker: str | None = None
    policy: str | None = None
    train: str | None = None
    heldout: str | None = None
    steps: PositiveInt
    seeds: PositiveInt
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    evaluation: Evaluation = Evaluation()
    short_tokens: PositiveInt = 8
    gates: list[Gate] = []


class Cell(_Part):
    """A method with its options, on a task.

    Attributes:
        learning_rates: an arm for each; none: one arm with that of the options.
        seed_offset: added to the seed of sampling and of the order of prompts, not to that of the
        policy.
        backend: ``local``: one process with plain transformers; ``stack``: ``train_ppo_ray``, with
        any of its options.
    """

    task: str
    options: dict[str, Any] = {}
    learning_rates: list[float] = []
    seed_offset: int = 0
    backend: Literal["local", "stack"] = "local"


class Contrast(_Part):
    """The difference of an outcome between two cells, seed by seed: first minus second.

    Attributes:
        claim: what a paper says, in words.
        source: where it says so.
        expect: the claimed sign; ``none``: that there is no difference.
        margin: differences below it do not matter.
        role: ``primary`` ones are judged together (Holm); ``check`` tests the study itself: two
            names of one method (``expect none``), a planted effect.
        gates: needed beside the task's.
        survival: learning rates are left out at which the runs of both cells together do not pass
        it.
        tuned_on: each cell at its own best learning rate, that with the best mean outcome on the
            first so many seeds, which are then left out; 0: both at the same learning rates.
    """

    cells: tuple[str, str]
    outcome: str
    claim: str = ""
    source: str = ""
    expect: Literal["greater", "less", "none"] = "greater"
    margin: float = Field(gt=0)
    role: Literal["primary", "secondary", "check"] = "secondary"
    gates: list[Gate] = []
    survival: Gate | None = None
    tuned_on: int = Field(0, ge=0)


class Study(_Part):
    """A study; ``options`` are those of all cells."""

    tasks: dict[str, Task]
    cells: dict[str, Cell]
    contrasts: dict[str, Contrast] = {}
    options: dict[str, Any] = {}
    run_timeout_minutes: float = Field(60.0, gt=0)

    @property
    def arms(self) -> list[Arm]:
        """All arms, those of a cell next to each other."""
        rates: list[tuple[str, float | None]] = [
            (name, rate)
            for name, cell in self.cells.items()
            for rate in (cell.learning_rates or (None,))
        ]
        return [Arm(name, rate) for name, rate in rates]

    def task_of(self, cell: str) -> Task:
        """The task of a cell."""
        return self.tasks[self.cells[cell].task]

    def options_of(self, arm: Arm) -> dict[str, Any]:
        """Options of an arm by dotted name: the study's, the task's, the cell's, the last one
        wins."""
        cell = self.cells[arm.cell]
        found: dict[str, Any] = {}
        for options in (self.options, self.tasks[cell.task].options, cell.options):
            for name, value in options.items():
                found |= {
                    setting.name: setting.value for setting in flattened(name, value, "study")
                }
        return found if arm.learning_rate is None else found | {LEARNING_RATE: arm.learning_rate}


@dataclass(frozen=True)
class Arm:
    """A cell at one learning rate; None: that of its options."""

    cell: str
    learning_rate: float | None = None

    @property
    def name(self) -> str:
        """Of rows and tables."""
        return self.cell if self.learning_rate is None else f"{self.cell}@{self.learning_rate:g}"


class StudyError(ValueError):
    """A study that cannot be run; a line for every fault: option, rule, value, remedy."""


class _StudyLoader(ConfigLoader):
    """With the merge key of YAML 1.1: ``<<: *other`` takes what another cell has."""


_StudyLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


def read_study(path: Path) -> Study:
    """Reads and checks a study.

    Raises:
        StudyError: the file cannot be read, or something in it is wrong.
    """
    try:
        with reading(path, "as YAML"):
            raw = yaml.load(read_text(path), Loader=_StudyLoader)  # noqa: S506 (a SafeLoader)
    except InputError as error:
        raise StudyError(str(error)) from error
    try:
        study = Study.model_validate(raw)
    except ValidationError as error:
        raise StudyError("\n".join(_line(path, detail) for detail in error.errors())) from error
    if found := list(faults(study)):
        raise StudyError("\n".join(found))
    return study


def _line(path: str | Path, detail: Any) -> str:
    """One of pydantic's errors, for people."""
    place = ".".join(map(str, detail["loc"])) or path
    if detail["type"] == "extra_forbidden":
        near = nearest(
            str(detail["loc"][-1]),
            [name for part in _Part.__subclasses__() for name in part.model_fields],
        )
        return f"{place}: unknown key" + (f"; did you mean {near}?" if near else "")
    said = (
        "is required"
        if detail["type"] == "missing"
        else f"{detail['msg']}, got {detail['input']!r:.80}"
    )
    return f"{place}: {said}"


def faults(study: Study) -> Iterator[str]:
    """What is wrong, a line each."""
    for name, task in study.tasks.items():
        given = [task.policy, task.train, task.heldout]
        if (task.maker is None) == (None in given) or (task.maker is not None and any(given)):
            yield (
                f"tasks.{name} needs either maker, or policy with train and heldout; got "
                f"{task.maker!r} and {given}"
            )
        elif missing := [
            path
            for path in [*(task.maker or "").split()[:1], *filter(None, given)]
            if not Path(path).exists()
        ]:
            yield (
                f"tasks.{name}: {', '.join(missing)} is not there; paths are those of the "
                "working directory"
            )
        yield from (fault for gate in task.gates for fault in _gate_faults(f"tasks.{name}", gate))
    unknown = [name for name, cell in study.cells.items() if cell.task not in study.tasks]
    yield from (
        f"cells.{name}.task must be one of {', '.join(study.tasks)}, got {study.cells[name].task!r}"
        for name in unknown
    )
    for name, contrast in study.contrasts.items():
        yield from _contrast_faults(f"contrasts.{name}", contrast, study)
    if not unknown:
        yield from dict.fromkeys(
            fault for arm in study.arms for fault in _option_faults(study, arm)
        )


def _contrast_faults(name: str, contrast: Contrast, study: Study) -> Iterator[str]:
    if missing := [cell for cell in contrast.cells if cell not in study.cells]:
        yield (
            f"{name}.cells must be cells of the study ({', '.join(study.cells)}), got "
            f"{', '.join(missing)}"
        )
        return
    first, second = (study.cells[cell] for cell in contrast.cells)
    if first.task != second.task:
        yield (
            f"{name}.cells must be on one task, got {first.task} and {second.task}: seeds of two "
            "tasks are not pairs"
        )
    if first.learning_rates != second.learning_rates and not contrast.tuned_on:
        yield (
            f"{name}.cells must have the same learning_rates, got {first.learning_rates} and "
            f"{second.learning_rates}: pairs are runs at one rate (tuned_on takes the best of "
            "each)"
        )
    if first.task in study.tasks and contrast.tuned_on >= (seeds := study.tasks[first.task].seeds):
        yield (
            f"{name}.tuned_on must leave seeds of {first.task}'s {seeds} to compare on, got "
            f"{contrast.tuned_on}"
        )
    if contrast.tuned_on and contrast.survival is not None:
        yield (
            f"{name}.survival must not be given with tuned_on, which takes one learning rate of "
            "each cell"
        )
    if not is_outcome(contrast.outcome):
        yield f"{name}.outcome must be {_KNOWN_OUTCOMES}, got {contrast.outcome!r}"
    for gate in [*contrast.gates, *([contrast.survival] if contrast.survival else [])]:
        yield from _gate_faults(name, gate)


def _gate_faults(place: str, gate: Gate) -> Iterator[str]:
    if not is_outcome(gate.outcome):
        yield (
            f"{place}: the outcome of gate {gate.name!r} must be {_KNOWN_OUTCOMES}, got "
            f"{gate.outcome!r}"
        )
    if gate.low is None and gate.high is None:
        yield f"{place}: gate {gate.name!r} needs low or high, or it says nothing"


def _option_faults(study: Study, arm: Arm) -> Iterator[str]:
    options = study.options_of(arm)
    for name in _GIVEN_BY_THE_STUDY:
        if name in options:
            yield (
                f"{arm.name}: {name} is given by the study to each of its runs, got "
                f"{options[name]}; leave it out"
            )
    if study.cells[arm.cell].backend == "local":
        yield from _local_faults(arm, options)
    try:
        config = resolve(
            {name: value for name, value in options.items() if name not in _GIVEN_BY_THE_STUDY},
            seed=0,
        )
        method, own, _ = algorithm_options(config)
        get_algorithm(method, warn=False, **own)
    except ConfigError as error:
        yield from (f"{arm.name}: {violation.message}" for violation in error.violations)
    except ValueError as error:  # of the method's own options
        yield f"{arm.name}: {error}"


def _local_faults(arm: Arm, options: Mapping[str, Any]) -> Iterator[str]:
    """Of options that a run in one process would ignore."""
    for name in options:
        if name not in _GIVEN_BY_THE_STUDY and not _READ.fullmatch(name):
            yield (
                f"{arm.name}: {name} is not read by a study's run, which has no engines and no "
                "ranks; leave it out, or give the cell backend: stack"
            )
    if (schedule := options.get("actor.lr_scheduler")) not in _SCHEDULES:
        yield (
            f"{arm.name}: actor.lr_scheduler must be one of {', '.join(_SCHEDULES)} in a study, "
            f"got {schedule}"
        )


def resolve(options: Mapping[str, Any], seed: int) -> RunConfig:
    """The configuration of a run, without its model and its data.

    Raises:
        ConfigError: the options break rules.
    """
    # in the form of a hub name: folders are looked for
    given = {"actor.model_name_or_path": "study/policy", "train.seed": seed}
    return build_config({**options, **given}, origin="study", files=False)


def only(study: Study, cells: Sequence[str]) -> list[Arm]:
    """The arms of some cells; of all, if none is named.

    Raises:
        StudyError: there is no such cell.
    """
    if missing := [cell for cell in cells if cell not in study.cells]:
        hint = f"; did you mean {near}?" if (near := nearest(missing[0], study.cells)) else ""
        raise StudyError(
            f"--only must name cells of the study ({', '.join(study.cells)}), got "
            f"{', '.join(missing)}{hint}"
        )
    return [arm for arm in study.arms if not cells or arm.cell in cells]
