"""The folders of a run, its checkpoints, and resuming from one. The ranks write their parts; the
leader adds its own (the driver, or rank 0 if there is none).

policy/, critic/ (model/): written by ``megatron.checkpoint``; controller.json: the leader's state
(place in the data, prompts in flight, KL coefficient, random states, ...); groups.safetensors:
tokens and log-probs of finished groups that are not trained; config.yaml; manifest.json: size and
SHA-256 of all of these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import safetensors.numpy

from openrlhf_ext.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Manifest,
    check_files,
    read_manifest,
    write_file,
)
from openrlhf_ext.checkpoints.files import VISIBLE_S, absent_files, read_plain, write_plain
from openrlhf_ext.checkpoints.model_state import STATE, model_faults
from openrlhf_ext.checkpoints.store import MANIFEST, best_content, best_of, step_of
from openrlhf_ext.config import ConfigError, RunConfig, format_config, value_of
from openrlhf_ext.config.show import format_options
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.inputs import MAP, InputError, check, reading
from openrlhf_ext.locks import FolderLock, LockError, check_held, displaced
from openrlhf_ext.megatron.model.hf_files import finish_interrupted, set_aside_hf
from openrlhf_ext.options import Violation
from openrlhf_ext.options.table import Configuration, table_of
from openrlhf_ext.patches.environment import code_version
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting import EventLog

logger = logging.getLogger(__name__)

CONTROLLER = "controller.json"
GROUPS = "groups.safetensors"
CONFIG = "config.yaml"
# options that may change between two parts of a run without an effect on the training
_IMMATERIAL = (
    "ckpt.",
    "logger.",
    "profile.",
    "dry_run",
    "strict",
    "train.max_restarts",
    "train.step_timeout_s",
    "ds.adam_offload",
)

# size up to which checksums are compared before the ranks, which share the reading, are there
_READ_BYTES = 64 << 20

Arrays = dict[str, np.ndarray]
State = tuple[dict[str, Any], Arrays]
"""The leader's state: plain values, and arrays by name."""
Call = Callable[..., list]
"""``call(method, timeout_s, **arguments)`` returns a method's results on every rank of a group;
raises a rank's error."""


# ---- folders


def checkpoint_store(config: TrainedConfig) -> CheckpointStore:
    return CheckpointStore(
        config.ckpt.path, config.ckpt.max_num, config.ckpt.max_mem * 1e9, check_own=check_held
    )


@contextmanager
def own_folders(config: TrainedConfig) -> Iterator[None]:
    """Holds the locks of every folder that the run writes into or moves aside, restarts included.
    Removes half-written files; without ``ckpt.load_enable`` moves checkpoints of an earlier run
    aside, and a final model unless the run resumes. Raises ConfigError if another run holds a
    folder, or if one cannot be changed."""
    faults, take_over = [], config.ckpt.take_over_lock
    with ExitStack() as held:
        for folder, options in _folders(config).values():
            names = " and ".join(options)
            try:
                held.enter_context(
                    closing(FolderLock(folder, take_over, "add --ckpt.take_over_lock"))
                )
            except LockError as error:
                faults.append(
                    Violation(options, f"{names} {folder} {error}, or give another {names}")
                )
            except OSError as error:
                faults.append(
                    Violation(
                        options, f"{names} {folder} cannot be locked: {error}; give another {names}"
                    )
                )
        if faults:
            raise ConfigError(faults)
        try:
            _make_ready(config, checkpoint_store(config))
        except (OSError, InputError) as error:
            options = ("ckpt.path", "ckpt.output_dir")
            said = (
                f"ckpt.path {config.ckpt.path} or ckpt.output_dir {config.ckpt.output_dir} "
                f"cannot be used: {error}"
            )
            raise ConfigError([Violation(options, f"{said}; give another")]) from error
        yield


def _make_ready(config: TrainedConfig, store: CheckpointStore) -> None:
    """Cleans the folders and moves an earlier run's results aside; a resumed run replaces its own
    final model."""
    _finish_interrupted(config, store)
    goes_on, moved = config.ckpt.load_enable, "%s holds %s of an earlier run%s: moved to %s"
    if not goes_on and (aside := store.set_aside_all()) is not None:
        logger.warning(moved, store.folder, "checkpoints", ", and ckpt.load_enable is off", aside)
    if not (goes_on and store.checkpoints()):
        for folder in (config.ckpt.output_dir, f"{config.ckpt.output_dir}_critic"):
            if (aside := set_aside_hf(folder)) is not None:
                logger.warning(moved, folder, "the final model", "", aside)


def _folders(config: TrainedConfig) -> dict[Path, tuple[Path, tuple[str, ...]]]:
    """Returns, by resolved folder, the folder as named and the options that name it."""
    named = {"ckpt.path": Path(config.ckpt.path), "ckpt.output_dir": Path(config.ckpt.output_dir)}
    if config.logger.metrics_path is not None:
        named["logger.metrics_path"] = Path(config.logger.metrics_path).parent
    folders: dict[Path, tuple[Path, tuple[str, ...]]] = {}
    for option, folder in named.items():
        first, options = folders.get(folder.resolve(), (folder, ()))
        folders[folder.resolve()] = (first, (*options, option))
    return folders


def check_shared_folders(config: TrainedConfig, call: Call, timeout_s: float) -> None:
    """Checks at the start that all ranks see the run's folders, so that no final weights are lost.
    Raises CheckpointError if a folder here is not the one that the ranks see under its name."""
    folders = {"ckpt.output_dir": config.ckpt.output_dir}
    if config.ckpt.saves or config.ckpt.load_enable:
        folders["ckpt.path"] = config.ckpt.path
    for option, folder in folders.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".seen-by-all-") as file:
            seen = call("sees", timeout_s, path=file.name)
        # rank 0 writes Hugging Face checkpoints, all ranks write the others
        blind = [
            rank
            for rank, sees in enumerate(seen)
            if not sees and (rank == 0 or option == "ckpt.path")
        ]
        if blind:
            raise CheckpointError(
                f"{option} must be on storage that all nodes share, the driver's too: a file "
                f"that was just written to {folder} is not seen by the policy's ranks {blind}"
            )


def clean_up(config: RunConfig) -> None:
    """Removes half-written files; call it when every process of an attempt has ended, or before the
    first starts."""
    store = checkpoint_store(config)
    try:
        _finish_interrupted(config, store)
    except (OSError, InputError) as error:
        logger.error(
            "something half-written may be left in %s or %s: %s",
            store.folder,
            config.ckpt.output_dir,
            error,
        )


def _finish_interrupted(config: TrainedConfig, store: CheckpointStore) -> None:
    store.clean()
    final = config.ckpt.output_dir
    for folder in (Path(final), Path(f"{final}_critic"), *store.folder.glob("global_step*_hf")):
        finish_interrupted(folder)


# ---- saving


def write_hf(call: Call, who: str, path: str, option: str, timeout_s: float) -> None:
    """Writes a group's model in Hugging Face form; ``option`` names the folder. Raises
    CheckpointError if rank 0 wrote to storage that is not seen here, RanksTimeoutError."""
    check_held()
    sizes, *_ = call("save_model", timeout_s, path=path)
    if absent := absent_files(Path(path), sizes, VISIBLE_S):
        raise CheckpointError(
            f"rank 0 of the {who} has written {path}, but the driver does not see "
            f"{', '.join(absent)} there: the files are on the disk of rank 0's node. {option} "
            "must be on storage that all nodes and the driver share"
        )


@dataclass
class _Pending:
    """A checkpoint that the ranks are still writing; ``best``: the next ``best.json`` if the
    checkpoint is one of the best."""

    step: int
    started: float
    best: dict[str, Any] | None


class Checkpointer:
    """Writes the checkpoints of one run. ``groups``: the trained groups, the policy's first;
    ``data``: the fingerprints of the run's data by name; ``best``: the metric whose best
    checkpoints are kept, and their number.
    """

    def __init__(
        self,
        config: TrainedConfig,
        groups: Mapping[str, Call],
        data: Mapping[str, str],
        timeout_s: float,
        events: EventLog,
        best: tuple[str, int] = ("", 1),
        background: bool = False,
    ) -> None:
        self._events, self.ckpt, self.groups, self.timeout_s = (
            events,
            config.ckpt,
            groups,
            timeout_s,
        )
        self._config, self._data = config, data
        label = {"label": config.training_label} if config.training_label else {}
        self.constants = {"options": plain_options(config), **data, **label}
        self.text = (
            format_config(config) if isinstance(config, RunConfig) else format_options(config)
        )
        self.best, self.background = best, background
        self.store = checkpoint_store(config)
        self._pending: _Pending | None = None

    def after_step(
        self,
        step: int,
        evaluation: Mapping[str, float] | None,
        state: Callable[[], State],
        record: Mapping[str, float] | None = None,
    ) -> None:
        """Saves if the step is due, or if its evaluation is among the best so far; calls ``state``
        only then. ``record``: the step's own metrics, which rank steps that are due."""
        self.finish(wait=False)
        is_due = self.ckpt.save_steps != -1 and step % self.ckpt.save_steps == 0
        best = self._best_with(step, {**(record or {} if is_due else {}), **(evaluation or {})})
        if best is not None or is_due:
            self.save(step, *state(), best=best)

    def _best_with(self, step: int, measured: Mapping[str, float]) -> dict[str, Any] | None:
        """Returns the next ``best.json`` if this step is one of the best that are kept."""
        name, number = self.best
        if not name or name not in measured:
            return None
        pending = None if self._pending is None else self._pending.best
        before, value = best_of(pending or self.store.best(), name), float(measured[name])
        # prefer the earlier of equal steps; a repeated step replaces itself
        kept = [pair for pair in before if pair[0] != step]
        kept = sorted([*kept, (step, value)], key=lambda pair: (-pair[1], pair[0]))[:number]
        return best_content(name, kept) if (step, value) in kept else None

    def save(
        self, step: int, state: dict[str, Any], arrays: Arrays, best: dict[str, Any] | None = None
    ) -> None:
        """Writes the checkpoint of a step in the configured forms."""
        if not self.ckpt.disable_ds:
            self._save_resumable(step, state, arrays, best, self.background)
        if self.ckpt.save_hf:
            path = f"{self.store.path_of(step)}_hf"
            write_hf(next(iter(self.groups.values())), "policy", path, "ckpt.path", self.timeout_s)
        if best is not None and self.ckpt.disable_ds:
            self.store.mark_best(best)
        self.store.rotate()

    def save_before_the_end(self, state: State, timeout_s: float) -> None:
        """Ensures a checkpoint of the step of ``state``; writes nothing afterwards. Raises
        RanksTimeoutError if the ranks need more than ``timeout_s`` seconds."""
        step, self.timeout_s = state[0]["step"], timeout_s
        if self.ckpt.disable_ds:
            logger.warning("no checkpoint is written: ckpt.disable_ds is set")
            return
        self.finish()
        if not self.store.path_of(step).exists():
            self._save_resumable(step, *state, best=None, background=False)
            self.store.rotate()

    def _save_resumable(
        self,
        step: int,
        state: dict[str, Any],
        arrays: Arrays,
        best: dict[str, Any] | None,
        background: bool,
    ) -> None:
        self.finish()
        pending, folder = _Pending(step, time.monotonic(), best), self.store.begin(step)
        try:
            entries = [
                write_plain(folder, CONTROLLER, {**state, **self.constants}),
                write_file(folder, GROUPS, [safetensors.numpy.save(dict(arrays))]),
                write_file(folder, CONFIG, [self.text.encode()]),
            ]
            parts: list[str] = []
            for name, call in self.groups.items():
                files = call(
                    "save_state",
                    self.timeout_s,
                    name=name,
                    folder=str(folder),
                    background=background,
                )
                parts += [f"{name}-{rank}" for rank in range(len(files))]
                entries += [] if background else [entry for part in files for entry in part]
            manifest = Manifest(
                step, tuple(entries), {"versions": _versions(), "best": best or self.store.best()}
            )
            if background:
                self.store.expect(manifest, parts)
        except BaseException:
            self.store.abandon(step)
            raise
        if background:
            self._pending = pending
            return
        self.store.commit(manifest)
        self._announce(pending, manifest)

    def poll(self) -> None:
        """Completes a background checkpoint if all of it is written; does not call the ranks."""
        if (
            self._pending is not None
            and (manifest := self.store.complete(self._pending.step)) is not None
        ):
            self._announce(self._pending, manifest)

    def finish(self, wait: bool = True) -> None:
        """Completes a background checkpoint; without ``wait`` only if all ranks are done. Raises if
        a rank could not write."""
        self.poll()
        pending = self._pending
        if pending is None:
            return
        try:
            if not all(
                done
                for call in self.groups.values()
                for done in call("has_saved", self.timeout_s, wait=wait)
            ):
                return
            self.store.await_receipts(pending.step)
        except BaseException:
            self._pending = None
            self.store.abandon(pending.step)
            raise
        self.poll()

    def go_back(self, why: str) -> Resumed:
        """Loads the newest checkpoint into the ranks again. Raises CheckpointError if there is
        none, or as `restore` does."""
        self.finish()
        there = self.store.checkpoints()
        if (
            not there
            or (resumed := _restored(self._config, self.groups, self._data, self.timeout_s)) is None
        ):
            raise CheckpointError(
                f"{why}\nno checkpoint to go back to is in {self.store.folder} yet "
                "(ckpt.save_steps)"
            )
        return resumed

    def _announce(self, pending: _Pending, manifest: Manifest) -> None:
        """Marks a complete checkpoint if it is one of the best, rotates, and logs it."""
        self._pending = None
        is_best = {}
        if pending.best is not None:
            self.store.mark_best(pending.best)
            place, metric = (
                [step for step, _ in best_of(pending.best)].index(pending.step),
                pending.best["metric"],
            )
            value = best_of(pending.best)[place][1]
            said = "the best" if place == 0 else f"number {place + 1} of the best"
            logger.info("step %d is %s so far: %s = %.4f", pending.step, said, metric, value)
            is_best = {"best": {metric: value}}
        self.store.rotate()
        seconds, size = time.monotonic() - pending.started, manifest.size / 2**20
        path = self.store.path_of(manifest.step)
        logger.info("wrote the checkpoint %s (%.1f MiB, %.1f s)", path, size, seconds)
        self._events.note(
            "checkpoint", of_step=pending.step, path=str(path), mib=size, seconds=seconds, **is_best
        )


# ---- options


def plain_options(config: Configuration) -> dict[str, str]:
    """Returns every option that is not a secret, as text by its name; addresses have no
    passwords."""
    names = [name for name, option in table_of(type(config)).items() if not option.info.secret]
    return {name: redact(repr(value_of(config, name))) for name in names}


def changed_options(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the options that differ from those of the run that wrote the checkpoint, with both
    values."""
    # an earlier release stored passwords
    before = {name: redact(value) for name, value in before.items()}
    names = [
        n
        for n in sorted(now)
        if before.get(n) not in (None, now[n]) and not n.startswith(_IMMATERIAL)
    ]
    return [f"{name}: {now[name]}, it was {before[name]}" for name in names]


def _versions() -> dict[str, str]:
    """Returns the versions of the code that determines a run's numbers."""
    return {
        "openrlhf_ext": code_version(),
        **{name: version(name) for name in ("torch", "megatron-core", "safetensors")},
    }


def report_other_code(before: Mapping[str, Any]) -> None:
    """Logs versions that differ from those that wrote the checkpoint; earlier releases did not
    store all of them."""
    for name, now in _versions().items():
        if before.get(name) not in (None, now):
            logger.warning("resuming with other code: %s %s, it was %s", name, now, before[name])


# ---- resuming


def resumption(config: TrainedConfig) -> str:
    """Returns how a user resumes a run that has ended early."""
    if said := displaced():
        return said
    newest = checkpoint_store(config).checkpoints()[-1:]
    if not newest:
        return f"no checkpoint is in {config.ckpt.path}: the run has to begin again"
    return f"to go on from {newest[0]}: the same command with --ckpt.load_enable"


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that this run resumes from, with the leader's state."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    arrays: Arrays


def restore(
    config: TrainedConfig,
    groups: Mapping[str, Call],
    data: Mapping[str, str],
    timeout_s: float,
    events: EventLog,
) -> Resumed | None:
    """Loads the newest checkpoint into the ranks if ``ckpt.load_enable`` is set and there is one.
    ``data`` is as in ``Checkpointer``. Raises CheckpointError if it is damaged (and
    ``ckpt.fallback_enable`` is off, or no other is good), or does not fit."""
    resumed = _restored(config, groups, data, timeout_s) if config.ckpt.load_enable else None
    events.repeat_from(0 if resumed is None else resumed.step)
    if resumed is not None:
        logger.info("resumed from %s", resumed.folder)
        events.note("resumed", resume_step=resumed.step, path=str(resumed.folder))
    return resumed


def _restored(
    config: TrainedConfig,
    groups: Mapping[str, Call],
    data: Mapping[str, str],
    timeout_s: float,
) -> Resumed | None:
    store = checkpoint_store(config)
    if not store.checkpoints():
        lines = [*_without_checkpoint(store)]
        for line in lines:
            logger.log(logging.WARNING if len(lines) > 1 else logging.INFO, line)
        return None
    folder = find_good(
        store, next(iter(groups.values())), timeout_s, fallback=config.ckpt.fallback_enable
    )
    state = _read_state(folder)
    changed = changed_options(state["options"], plain_options(config))
    if faults := [*_state_faults(folder, state, data, groups, changed)]:
        raise CheckpointError("\n".join(faults))
    about = check(read_manifest(folder).about, str(folder / MANIFEST), {}, {"versions": MAP})
    report_other_code(about.get("versions", {}))
    for line in changed:
        logger.warning("resuming with another %s", line)
    for name, call in groups.items():
        call("load_state", timeout_s, folder=str(folder), name=name)
        call("check_loaded", timeout_s, folder=str(folder), name=name)
    store.recover_best(folder)
    with reading(folder / GROUPS, "as safetensors"):
        arrays = safetensors.numpy.load_file(folder / GROUPS)
    return Resumed(folder, step_of(folder), state, arrays)


def find_good(store: CheckpointStore, call: Call, timeout_s: float, *, fallback: bool) -> Path:
    """Returns the newest undamaged checkpoint; the ranks share the reading. Raises CheckpointError
    if the newest one is damaged and ``fallback`` is off, or if all are."""
    damaged = []
    for folder in reversed(store.checkpoints()):
        problems = _problems(folder, call, timeout_s)
        if not problems:
            return folder
        damaged.append(f"{folder} is not usable:\n  " + "\n  ".join(problems))
        if not fallback:
            raise CheckpointError(
                f"{damaged[0]}\nAdd --ckpt.fallback_enable to go back to the newest good "
                "checkpoint, or remove the folder"
            )
        logger.error("%s\n  going back to the checkpoint before it", damaged[-1])
    raise CheckpointError("no checkpoint is usable:\n" + "\n".join(damaged))


def _problems(folder: Path, call: Call, timeout_s: float) -> list[str]:
    try:
        step = read_manifest(folder).step
    except CheckpointError as error:
        return [str(error)]
    if step != step_of(folder):
        return [
            f"its name says step {step_of(folder)}, its {MANIFEST} step {step}: rename it to "
            f"global_step{step}"
        ]
    return [
        problem
        for part in call("check_checkpoint", timeout_s, folder=str(folder))
        for problem in part
    ]


def _read_state(folder: Path) -> dict[str, Any]:
    if not (folder / GROUPS).is_file():
        raise CheckpointError(
            f"{folder} holds no {GROUPS}: it was written by an earlier release, whose place in "
            "the data means nothing to this one. Start a new run from weights in Hugging Face "
            "form (ckpt.save_hf, ckpt.output_dir)"
        )
    return check(read_plain(folder / CONTROLLER), str(folder / CONTROLLER), {"options": MAP})


def _state_faults(
    folder: Path,
    state: Mapping[str, Any],
    data: Mapping[str, str],
    groups: Iterable[str],
    changed: Sequence[str],
) -> Iterator[str]:
    """Yields why a run with these ``groups``, ``data``, and ``changed_options`` cannot resume from
    a checkpoint."""
    of_data = [line for line in changed if line.startswith("data.")]
    if other := [what for what, fingerprint in data.items() if state.get(what) != fingerprint]:
        yield (
            f"{folder} was written by a run with other {other[0]}: the place in the data that it "
            "holds means nothing for these. Resume with the same data.* options and unchanged "
            "files, or start a new run from its weights with another "
            f"ckpt.path{''.join(f'; {line}' for line in of_data)}"
        )
    if workers := [line for line in of_data if line.startswith("data.dataloader_num_workers")]:
        yield (
            f"{folder} holds the place of a loader with other workers ({workers[0]}): resume "
            "with as many"
        )
    for name in groups:
        if not (folder / name).is_dir():
            yield f"{folder} holds no {name}: it was written by a run without one"


def check_resume(
    config: TrainedConfig,
    models: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, str],
) -> list[str]:
    """Returns lines on what a resume would do, before any process starts; reads only small files.

    ``models``: what a checkpoint must hold of each trained model (``model_faults``), empty for a
    model that is not on this machine; ``data``: as in ``Checkpointer``, empty if it is not on this
    machine. Raises ConfigError, which lists all reasons against a resume.
    """
    store = checkpoint_store(config)
    if not config.ckpt.load_enable or not store.checkpoints():
        return [*_without_checkpoint(store)] if config.ckpt.load_enable else []
    faults, folder, changed = [], store.checkpoints()[-1], []
    try:
        folder = find_good(store, _check_here, 0.0, fallback=config.ckpt.fallback_enable)
    except CheckpointError as error:
        faults.append(str(error))
    try:
        state = _read_state(folder)
        changed = changed_options(state["options"], plain_options(config))
        faults += _state_faults(folder, state, data, models, changed)
        for path, ours in ((folder / name, ours) for name, ours in models.items() if ours):
            faults += model_faults(path, read_plain(path / STATE), ours) if path.is_dir() else ()
    except (CheckpointError, InputError) as error:
        faults.append(str(error))
    if faults:
        option = "ckpt.load_enable"
        raise ConfigError([Violation((option,), f"{option}: {fault}") for fault in faults])
    unseen = [*(name for name, ours in models.items() if not ours), *([] if data else ["data"])]
    unknown = [f"not compared, it is not on this machine: {name}" for name in unseen]
    return [f"goes on from {folder}", *(f"with another {line}" for line in changed), *unknown]


def _check_here(_: str, __: float, *, folder: str) -> list[list[str]]:
    """Checks a checkpoint without ranks, as their ``check_checkpoint`` does."""
    return [check_files(Path(folder), read_manifest(Path(folder)).files, _READ_BYTES)]


def _without_checkpoint(store: CheckpointStore) -> Iterator[str]:
    yield f"no checkpoint in {store.folder} yet: the run starts from the beginning"
    for folder in sorted({path.parent for path in store.folder.glob("superseded.*/global_step*")}):
        yield f"checkpoints of an earlier run are in {folder}: to go on from them, move them back"
