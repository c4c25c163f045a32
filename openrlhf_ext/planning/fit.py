"""Decides whether a run fits on its GPUs: the layout that ``megatron.layout auto`` chooses, and the
verdict of a dry run.

Both use the planner's sums. The report of a run's options rejects states that are larger than a
GPU. A dry run also reports the activations and the estimates.
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import math
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import yaml

from openrlhf_ext.config import ConfigError, Findings, RunConfig, Violation, value_of
from openrlhf_ext.config.file_rules import not_given
from openrlhf_ext.config.files import is_hub_name, model_folder, unknown_model
from openrlhf_ext.config.load import CHOSEN
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.config.upstream import stands_in
from openrlhf_ext.inputs import InputError
from openrlhf_ext.options import is_set, nest
from openrlhf_ext.planning.candidate import SHARE, Candidate, PlanError, order, with_options
from openrlhf_ext.planning.memory import GIB, TOTAL, Moment
from openrlhf_ext.planning.search import ENDS, EXPERTS, SIZES, Planner
from openrlhf_ext.planning.seconds import GPUS, card
from openrlhf_ext.redaction import redact

logger = logging.getLogger(__name__)

_LAYOUT, _MEMORY = "megatron.layout", "megatron.gpu_memory_gib"
# Control groups version 2 and version 1.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_ASSUMED = "H100"
_ASK_S = 60.0
_MOST_GPUS, _NODE = 1024, 8
_COUNTS = ("actor", "critic", "reward", "ref")
_PARTS_SHOWN = 5
Goal = Literal["fits", "stands"]


# ---- the GPU


@dataclass(frozen=True)
class Device:
    """The GPUs of a run.

    ``said``: a description; ``kind``: the entry of the planner's table, which gives the rates;
    ``is_known``: the memory was measured or given.
    """

    said: str
    memory: int
    kind: str = _ASSUMED
    is_known: bool = True

    @property
    def remedy(self) -> str:
        return "" if self.is_known else f"; set {_MEMORY} to the memory of the run's GPUs"


_ASSUMED_DEVICE = Device(
    f"an {_ASSUMED} (there is no GPU here)", GPUS[_ASSUMED].memory, is_known=False
)


def _device_of(config: RunConfig) -> Device | None:
    """The GPU that the run trains on; None on CPU, where there is no memory limit to check.

    Without a GPU here, a run is on CPU unless it joins a cluster. A dry run is assumed to be for a
    run on GPUs, unless its weights travel by gloo.
    """
    here = _gpu_here()
    if config.megatron.gpu_memory_gib is not None:
        memory = int(config.megatron.gpu_memory_gib * GIB)
        kind = _ASSUMED if here is None else here.kind
        return Device(f"a GPU ({_MEMORY})", memory, kind)
    if here is not None:
        return here
    # The driver joins that cluster.
    elsewhere = os.environ.get("RAY_ADDRESS", "") not in ("", "local")
    on_gpus = config.dry_run or config.dry_run_json or elsewhere
    return _ASSUMED_DEVICE if on_gpus and config.vllm.sync_backend != "gloo" else None


@cache
def _gpu_here() -> Device | None:
    """This machine's GPU, queried in a separate process: once CUDA is initialized in this process,
    its fork, the driver, cannot use it."""
    if not glob.glob("/dev/nvidia[0-9]*"):
        return None
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_ask_cuda, args=(sender,), daemon=True)
    child.start()
    sender.close()
    try:
        if not receiver.poll(_ASK_S):
            raise EOFError(f"no answer within {_ASK_S:g} s")
        found = receiver.recv()
    except EOFError as error:
        logger.warning("this machine's GPU does not report its memory (%s): set %s", error, _MEMORY)
        return None
    finally:
        child.kill()
        child.join()
    if found is None:
        return None
    name, memory = found
    return Device(f"this machine's {name}", memory, card(name) or _ASSUMED)


def _memory_here() -> int:
    """Bytes of memory that this machine, or its container, gives processes."""
    there = psutil.virtual_memory().total
    for limit in map(Path, _MEMORY_LIMITS):
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            there = min(there, int(text))
    return there


def _ask_cuda(sender: Connection) -> None:
    """Sends name and bytes of this process's first GPU, None without a GPU."""
    found = None
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(0)
        found = (there.name, there.total_memory)
    sender.send(found)


def _planner(config: RunConfig, device: Device) -> Planner:
    return Planner(config, device.kind, device_memory=device.memory, own=True)


# ---- choosing a layout


def choice(trained: TrainedConfig) -> dict[str, Any]:
    """Returns the options that ``megatron.layout auto`` chooses; an empty dict if the model's
    config.json is not here yet.

    The default layout (1 everywhere) is chosen if it leaves a tenth of the GPU free, else the best
    by the planner's order, else the layout that lacks the least memory, if its states fit. GPU
    counts, engines and options of the run stay. Sizes given for DeepSpeed stay if a layout with
    them fits. Called before the rules are checked, so rules may be broken.
    """
    config = trained.as_run()
    given: dict[str, Any] = {_LAYOUT: "given"}
    if (device := _device_of(config)) is None:
        return given
    try:
        found = _left_to_us(config, device) or {}
    except PlanError:
        return {}
    except InputError:  # a fault of config.json, which the rules report
        return given
    return given | {name: value for name, value in found.items() if value != value_of(config, name)}


def _left_to_us(config: RunConfig, device: Device) -> dict[str, Any] | None:
    # Sizes that come from DeepSpeed's options split sequences and heads, but no states.
    freed = _unset(config, [name for name in SIZES if stands_in(config, name)])
    tries = [config] if freed is config else [config, freed]
    goals: tuple[Goal, ...] = ("fits", "stands")
    for goal in goals:
        for tried in tries:
            if (options := _search(_planner(tried, device), goal)) is not None:
                return options
    return None


def _unset(config: RunConfig, names: Sequence[str]) -> RunConfig:
    """Returns the configuration with these options of ``megatron.*`` unset."""
    if not names:
        return config
    own = config.megatron
    left = own.model_fields_set - {name.removeprefix("megatron.") for name in names}
    kept = {name: value for name, value in own if name in left}
    return config.model_copy(update={"megatron": type(own)().model_copy(update=kept)})


def _search(planner: Planner, goal: Goal) -> dict[str, Any] | None:
    """Returns the options of a layout that reaches the goal; {} if the layout as written reaches
    it, None if no layout does.

    A critic has the policy's sizes if any layout with them fits.
    """
    config = planner.config
    if goal == "fits" and planner.is_allowed:
        written = planner.as_configured()
        if written.fits and not any(map(written.tight, written.decisive)):
            return {}
    if (best := _best(planner, goal)) is not None or not config.has_critic:
        return best
    for sizes in planner.critic_layouts():
        sized = dataclasses.replace(planner, config=with_options(config, sizes))
        if (best := _best(sized, goal)) is not None:
            return {**sizes, **best}
    return None


def _best(planner: Planner, goal: Goal) -> dict[str, Any] | None:
    """Returns the options of the best layout that reaches the goal.

    An engine with its own GPU keeps its share: a better one would change only the predicted
    seconds.
    """
    shared = planner.config.engines_share_gpus
    found = [*planner.layouts()]
    good = [candidate for candidate in found if getattr(candidate, goal)]
    lacks_share = not good if shared else any(candidate.short for candidate in good)
    if lacks_share and not is_set(planner.config, SHARE):
        shares = [planner.with_best_share(candidate.options) for candidate in found]
        good = [candidate for candidate in shares if getattr(candidate, goal)]
    if not good:
        return None
    best = min(good, key=order).options
    return {name: value for name, value in best.items() if shared or name != SHARE}


# ---- runs that cannot fit


def findings(config: TrainedConfig) -> Findings:
    """For ``load(rules=...)``: finds states that exceed a GPU, and reports what
    ``megatron.layout auto`` chose."""
    is_run = isinstance(config, RunConfig)
    run = config.as_run()
    if is_run and run.megatron.layout == "auto":
        later = (
            "megatron.layout auto: the sizes are chosen at the start of the run, once the model's "
            "config.json is on this machine"
        )
        return Findings((), (later,))
    if (found := _laid_out(run)) is None:
        return Findings((), ())

    planner, laid_out, device = found
    of_rank = _rank_too_large(planner, laid_out, device, config.names_in_run)
    violations = (*of_rank, *_host_too_small(laid_out))
    if not is_run:
        return Findings(violations, ())
    violations = (*_engine_too_large(laid_out, device), *violations)
    is_chosen = any(source.startswith(CHOSEN) for source in config.sources.values())
    warnings = (_chosen(run, laid_out, device),) if is_chosen and not violations else ()
    return Findings(violations, warnings)


def _laid_out(config: RunConfig) -> tuple[Planner, Candidate, Device] | None:
    """Returns None on CPU, before a layout is chosen, and if other rules are broken."""
    if config.megatron.layout == "auto" or (device := _device_of(config)) is None:
        return None
    planner = _planner(config, device)
    try:
        return (planner, planner.as_configured(), device) if planner.is_allowed else None
    except (PlanError, InputError):  # the verdict or the rules report it
        return None


def laid_out(config: RunConfig) -> RunConfig:
    """Returns the configuration of a run whose models have just been downloaded, with its layout
    chosen.

    Raises ConfigError if states exceed a GPU.
    """
    if config.megatron.layout == "given":
        return config
    options = choice(config)
    decided = with_options(config, options)
    decided._sources = config.sources | (dict.fromkeys(options, CHOSEN) if len(options) > 1 else {})
    found = findings(decided)
    if found.violations:
        raise ConfigError(list(found.violations))
    for line in found.warnings:
        logger.warning(line)
    return decided


def _chosen(config: RunConfig, laid_out: Candidate, device: Device) -> str:
    fullest = max(laid_out.decisive, key=TOTAL)
    caution = ", which is tight: parts of the sum are estimates" if laid_out.tight(fullest) else ""
    if not laid_out.fits:
        caution = (
            ": activations of the longest sequences do not fit, and no other layout of these GPUs "
            "needs less"
        )
    made = {
        name: source
        for name, source in config.sources.items()
        if source.startswith(CHOSEN) and name != _LAYOUT
    }
    instead = [
        f"; {name} {value_of(config, name)} {source.removeprefix(f'{CHOSEN}, ')}"
        for name, source in made.items()
        if source != CHOSEN
    ]
    return (
        f"megatron.layout auto: {_written(config, made)}; set these options to keep it. While "
        f"{fullest.doing}, the fullest GPU holds {fullest.total / GIB:.1f} of "
        f"{device.memory / GIB:.1f} GiB of {device.said}{caution}{device.remedy}{''.join(instead)}"
    )


def _written(config: RunConfig, chosen: Iterable[str]) -> str:
    """Returns the chosen options as YAML on one line: the first size, and the others that differ
    from their default."""
    default = RunConfig()
    values = {SIZES[0]: value_of(config, SIZES[0])}
    for name in chosen:
        if (value := value_of(config, name)) != value_of(default, name):
            values[name] = value
    text = yaml.safe_dump(nest(values), default_flow_style=True, sort_keys=False, width=math.inf)
    return text.strip()[1:-1]


def _engine_too_large(laid_out: Candidate, device: Device) -> Iterator[Violation]:
    weights = laid_out.engines.weights
    if weights <= device.memory:
        return
    whole = weights * laid_out.engines.tensor_parallel_size
    enough = next((size for size in (2, 4, 8, 16) if whole // size < device.memory), 32)
    yield Violation(
        ("vllm.tensor_parallel_size", "actor.model_name_or_path"),
        f"vllm.tensor_parallel_size must be at least {enough}: an engine's weights take "
        f"{weights / GIB:.1f} GiB of a GPU, but {device.said} has "
        f"{device.memory / GIB:.1f}{device.remedy}",
    )


def _rank_too_large(
    planner: Planner, laid_out: Candidate, device: Device, called: Mapping[str, str]
) -> Iterator[Violation]:
    """Yields a violation if a rank's states exceed a GPU. ``called``: the command's names of
    options, where they differ."""
    standing = max((moment.standing for moment in laid_out.decisive), key=TOTAL)
    if standing.total <= device.memory:
        return
    layout = laid_out.policy.layout
    options = [*SIZES]
    got = f"{layout.tensor_parallel_size} * {layout.pipeline_parallel_size}"
    got += f" on {layout.world_size} ranks"
    if laid_out.policy.shape.is_mixture:
        options += EXPERTS
        got += f", {EXPERTS[0]} {layout.expert_parallel_size}"
    options += [
        "actor.num_nodes",
        "actor.num_gpus_per_node",
        "actor.model_name_or_path",
        _LAYOUT,
        "train.colocate_all",
    ]
    beside = ""
    if planner.config.engines_share_gpus:
        beside = " with the engine beside it"
        options += [
            SHARE,
            "vllm.num_engines",
            "vllm.tensor_parallel_size",
            "ds.enable_sleep",
            "vllm.enable_sleep",
        ]
    yield Violation(
        tuple(called.get(name, name) for name in options),
        f"{' * '.join(SIZES[:2])} must split the models so that a rank fits on a GPU{beside}: got "
        f"{got}, with which {standing.doing} takes {standing.total / GIB:.1f} GiB before any "
        f"activation ({_shown(standing)}), but {device.said} has {device.memory / GIB:.1f}; "
        f"{_remedy(planner.config, device, called)}{device.remedy}",
    )


def _host_too_small(laid_out: Candidate) -> Iterator[Violation]:
    """Yields a violation if Adam's states exceed the host memory of this machine; checked only if
    it has the run's GPUs."""
    config = laid_out.policy.config
    if not config.ds.optimizer_on_host or _gpu_here() is None:
        return
    host = Moment("host memory of a node", laid_out.host)
    there = _memory_here()
    if host.total <= there:
        return
    options = ["ds.adam_offload", "actor.num_nodes"]
    copied = ""
    if config.ckpt.async_enable and config.ckpt.saves:
        options.append("ckpt.async_enable")
        copied = ", leave ckpt.async_enable out"
    yield Violation(
        tuple(options),
        f"ds.adam_offload: the ranks of a node would keep {host.total / GIB:.1f} GiB in its host "
        f"memory ({_shown(host)}), but this machine has {there / GIB:.1f}; use more "
        f"nodes{copied}, or leave ds.adam_offload out",
    )


def _remedy(config: RunConfig, device: Device, called: Mapping[str, str]) -> str:
    """Returns sizes that fit, or a larger number of GPUs."""
    cuts = (
        *SIZES,
        *EXPERTS,
        *ENDS,
        "megatron.sequence_parallel_enable",
        "megatron.virtual_pipeline_size",
    )
    free = _unset(config, cuts)
    on_host = _on_host(config, device)
    factor = 1
    while factor * config.world_size <= _MOST_GPUS:
        counts = _on_more(free, factor) if factor > 1 else {}
        more = with_options(free, counts)
        if (options := _search(_planner(more, device), "fits")) is not None:
            sizes = _written(with_options(more, options), options)
            if factor == 1:
                return (
                    "leave the sizes out, so that megatron.layout auto chooses them, or use "
                    f"{sizes}{on_host}"
                )
            told = {name: count for name, count in counts.items() if count > 1 or not called}
            said = ", ".join(f"{called.get(name, name)} {count}" for name, count in told.items())
            return f"no layout of these GPUs fits; {said} with {sizes} would fit{on_host}"
        factor *= 2
    shared = (
        f", add ds.enable_sleep and vllm.enable_sleep, or lower {SHARE}"
        if config.engines_share_gpus
        else ""
    )
    return f"no layout fits, even with more GPUs: lower data.max_len{shared}{on_host}"


def _on_host(config: RunConfig, device: Device) -> str:
    """Returns the hint that the run fits with Adam's states in host memory, or ""."""
    offload = _planner(config, device).to_host
    if not offload:
        return ""
    tries = {"": config, ", with the sizes left out": _unset(config, (*SIZES, *EXPERTS, *ENDS))}
    for how, tried in tries.items():
        if _search(_planner(with_options(tried, offload), device), "fits") is not None:
            return (
                "; it fits with ds.adam_offload too, which keeps the optimizer states in host "
                f"memory{how}"
            )
    return ""


def _on_more(config: RunConfig, factor: int) -> dict[str, int]:
    """Returns the counts for ``factor`` times the GPUs, including engines of shared GPUs: whole
    nodes first."""
    options: dict[str, int] = {}
    for section in _COUNTS:
        counts = getattr(config, section)
        if section != "actor" and not counts.model_fields_set & {"num_nodes", "num_gpus_per_node"}:
            continue
        ranks = counts.num_nodes * counts.num_gpus_per_node * factor
        per_node = ranks if ranks <= _NODE else max(_NODE, counts.num_gpus_per_node)
        if ranks % per_node == 0:
            options |= {
                f"{section}.num_nodes": ranks // per_node,
                f"{section}.num_gpus_per_node": per_node,
            }
    if config.engines_share_gpus:
        options["vllm.num_engines"] = config.vllm.num_engines * factor
    return options


# ---- the verdict of a dry run


@dataclass(frozen=True)
class Verdict:
    """The verdict of a dry run; ``starts``: whether a run would start once its missing options are
    given."""

    text: str
    details: tuple[str, ...]
    starts: bool


def verdict(config: RunConfig) -> Verdict:
    """Returns the verdict from ``plan``'s sum, for this machine's GPU, or an H100 if there is none;
    on CPU without a sum."""
    starts = "would start"
    if missing := [violation.options[0] for violation in not_given(config)]:
        starts += f", once {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} given"
    device = _device_of(config)
    what = "processes on CPU" if device is None else "GPUs"
    details = [*_model_lines(config), *_places(config, what)]
    if device is None:
        return Verdict(starts, tuple(details), True)
    try:
        laid_out = _planner(config, device).as_configured()
    except PlanError as error:
        unknown = "the model is not here"
        if model_folder(config.actor.model_name_or_path or ""):
            unknown = str(error)
        return Verdict(f"{starts}; its memory is not known: {unknown}", tuple(details), True)
    details += _memory_lines(laid_out, device.said)
    if not laid_out.short:
        tight = "; memory is tight" if any(map(laid_out.tight, laid_out.decisive)) else ""
        return Verdict(f"{starts}{tight}", tuple(details), True)
    short = (
        f"does not fit on {device.said}: {laid_out.lacking}; openrlhf-ext plan finds layouts that "
        "fit"
    )
    if not device.is_known:  # the run's own GPU may be larger than the assumed H100
        return Verdict(f"{starts}, but it {short}", tuple(details), True)
    return Verdict(f"would fail: it {short}", tuple(details), False)


def _model_lines(config: RunConfig) -> Iterator[str]:
    name = config.actor.model_name_or_path or ""
    if not is_hub_name(name):
        yield f"model: {redact(name)}"
    elif (folder := model_folder(name)) is not None:
        yield (
            f"model: {name} of the hub, which a run downloads; config.json is that of "
            f"{os.path.relpath(folder)}"
        )
    else:
        yield redact(f"model: {unknown_model(name)}")


def _places(config: RunConfig, what: str) -> Iterator[str]:
    yield (
        f"{what}: {config.gpus}: {config.training_ranks} ranks that train or score, "
        f"{config.vllm.num_engines} engines of {config.vllm.tensor_parallel_size} on "
        f"{'the same' if config.engines_share_gpus else 'others'}"
    )


def _memory_lines(laid_out: Candidate, gpu: str) -> Iterator[str]:
    yield (
        f"memory of the fullest GPU, of {laid_out.memory / GIB:.1f} GiB of {gpu}; calculated, "
        "nothing was allocated:"
    )
    yield from (f"  {one.doing} {one.total / GIB:.1f}: {_shown(one)}" for one in laid_out.moments)
    if laid_out.policy.config.ds.optimizer_on_host:
        host = Moment("host memory of a node", laid_out.host)
        yield f"  {host.doing} {host.total / GIB:.1f}: {_shown(host)}"


def _shown(moment: Moment) -> str:
    parts = sorted(moment.parts.items(), key=lambda part: -part[1])
    shown = [f"{name} {size / GIB:.1f}" for name, size in parts[:_PARTS_SHOWN]]
    if others := sum(size for _, size in parts[_PARTS_SHOWN:]):
        shown.append(f"others {others / GIB:.1f}")
    return ", ".join(shown)
