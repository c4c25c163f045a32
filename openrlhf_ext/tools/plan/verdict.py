"""What a dry run says first: whether the run would start, and the memory of its fullest GPUs beside that of a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.file_rules import not_given
from openrlhf_ext.config.files import is_hub_name, model_folder, unknown_model
from openrlhf_ext.redaction import redact
from openrlhf_ext.tools.plan.memory import GIB
from openrlhf_ext.tools.plan.moments import Moment
from openrlhf_ext.tools.plan.search import Candidate, PlanError, Planner, lacking

_PARTS_SHOWN = 5


@dataclass(frozen=True)
class Verdict:
    """Of a dry run.

    Attributes:
        details: model, GPUs and memory.
        starts: whether a run would, once it has what it was not given.
    """

    text: str
    details: tuple[str, ...]
    starts: bool


def verdict(config: RunConfig) -> Verdict:
    """The same sum as ``plan``'s, for the GPU of this machine, or an H100's where there is none."""
    name, memory = _gpu()
    missing = " and ".join(violation.options[0] for violation in not_given(config))
    starts = f"would start, once {missing} {'are' if ' and ' in missing else 'is'} given" if missing else "would start"
    details = [*_model_lines(config), *_places(config)]
    try:
        laid_out = Planner(config, device_memory=memory).as_configured()
    except PlanError as error:
        unknown = str(error) if model_folder(config.actor.model_name_or_path or "") else "the model is not here"
        return Verdict(f"{starts}; its memory is not known: {unknown}", tuple(details), True)
    details += _memory_lines(laid_out, name)
    if not laid_out.short:
        # an engine that is alone on its GPU takes the share that it is given, whatever it needs
        decisive = laid_out.moments if config.train.colocate_all else laid_out.moments[1:]
        tight = "; memory is tight" if any(laid_out.tight(moment) for moment in decisive) else ""
        return Verdict(f"{starts}{tight}", tuple(details), True)
    short = f"does not fit on {name}: {lacking(laid_out)}; openrlhf-ext plan finds what does"
    if memory is None:  # nobody said that it is an H100 where the run will be
        return Verdict(f"{starts}, but it {short}", tuple(details), True)
    return Verdict(f"would fail: it {short}", tuple(details), False)


def _gpu() -> tuple[str, int | None]:
    """The GPU of this machine and its bytes, None where there is none."""
    if not torch.cuda.is_available():
        return "an H100 (there is no GPU here)", None
    return f"this machine's {torch.cuda.get_device_name(0)}", torch.cuda.get_device_properties(0).total_memory


def _model_lines(config: RunConfig) -> Iterator[str]:
    name = config.actor.model_name_or_path or ""
    if not is_hub_name(name):
        yield f"model: {redact(name)}"
    elif (folder := model_folder(name)) is not None:
        yield f"model: {name} of the hub, which a run downloads; config.json is that of {os.path.relpath(folder)}"
    else:
        yield redact(f"model: {unknown_model(name)}")


def _places(config: RunConfig) -> Iterator[str]:
    """GPUs by what is on them."""
    workers, ranks = config.engine_workers, config.training_ranks
    shared = config.train.colocate_all
    yield (
        f"GPUs: {config.world_size if shared else ranks + workers}: {ranks} ranks that train or score, "
        f"{config.vllm.num_engines} engines of {config.vllm.tensor_parallel_size} on "
        f"{'the same' if shared else 'others'}"
    )


def _memory_lines(laid_out: Candidate, gpu: str) -> Iterator[str]:
    yield f"memory of the fullest GPU, of {laid_out.memory / GIB:.1f} GiB of {gpu}; sums, nothing was allocated:"
    yield from (f"  {_moment_line(moment)}" for moment in laid_out.moments)


def _moment_line(moment: Moment) -> str:
    parts = sorted(moment.parts.items(), key=lambda part: -part[1])
    shown = [f"{name} {size / GIB:.1f}" for name, size in parts[:_PARTS_SHOWN]]
    if others := sum(size for _, size in parts[_PARTS_SHOWN:]):
        shown.append(f"others {others / GIB:.1f}")
    return f"{moment.doing} {moment.total / GIB:.1f}: {', '.join(shown)}"
