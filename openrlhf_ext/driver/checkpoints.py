"""Saving a run's state while it trains, and going on from it: the ranks write their parts, the driver adds its own.

policy/, critic/: what ``megatron.checkpoint`` writes; controller.json: the driver's state (place in the data,
prompts in flight, KL coefficient, random states, ...); groups.safetensors: tokens and log-probs of the groups that
are finished and not trained; config.yaml; manifest.json: size and SHA-256 of all of these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from openrlhf_ext.checkpoints import CheckpointError, CheckpointStore, Manifest, read_manifest, write_file
from openrlhf_ext.checkpoints.files import VISIBLE_S, absent_files, read_plain, write_plain
from openrlhf_ext.checkpoints.store import MANIFEST, best_content, best_of, step_of
from openrlhf_ext.config import RunConfig, format_config, option_table, value_of
from openrlhf_ext.driver.about import checkpoint_store
from openrlhf_ext.driver.rollouts import Group, Prompt
from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.model.hf_files import finish_interrupted, set_aside_hf
from openrlhf_ext.redaction import redact
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.rollout.response import Response

if TYPE_CHECKING:
    from openrlhf_ext.driver.placement import RankGroup

logger = logging.getLogger(__name__)

CONTROLLER = "controller.json"
GROUPS = "groups.safetensors"
CONFIG = "config.yaml"
# options whose change between two parts of a run says nothing about the training
_IMMATERIAL = ("ckpt.", "logger.", "profile.", "dry_run", "strict", "train.max_restarts", "train.step_timeout_s")

Arrays = dict[str, np.ndarray]
DriverState = tuple[dict[str, Any], Arrays]
"""Plain values, and arrays by name."""


def write_hf(group: RankGroup, who: str, path: str, option: str, timeout_s: float) -> None:
    """Has a group write its model in Hugging Face form; ``option`` names the folder. Raises CheckpointError if rank 0
    wrote to storage that the driver does not see, RanksTimeoutError."""
    sizes, *_ = call_ranks(group, who, "save_model", timeout_s, path=path)
    if absent := absent_files(Path(path), sizes, VISIBLE_S):
        raise CheckpointError(
            f"rank 0 of the {who} has written {path}, but the driver does not see {', '.join(absent)} there: the "
            f"files are on the disk of rank 0's node. {option} must be on storage that all nodes and the driver share"
        )


@dataclass
class _Pending:
    """A checkpoint that the ranks are still writing; ``best``: the coming ``best.json`` if it is one of the best."""

    step: int
    started: float
    best: dict[str, Any] | None


class Checkpointer:
    """Writes the checkpoints of one run. Of the ``groups`` that are trained the first is the policy's; ``prompts`` is
    the fingerprint of the run's."""

    def __init__(
        self, config: RunConfig, groups: Mapping[str, RankGroup], prompts: str, events: EventLog | None = None
    ) -> None:
        self._events = events or EventLog()
        self.config, self.groups, self.timeout_s = config, dict(groups), config.train.step_timeout_s
        label = config.training_label
        self.constants = {"options": plain_options(config), "prompts": prompts} | ({"label": label} if label else {})
        self.store = checkpoint_store(config)
        self._pending: _Pending | None = None

    def after_step(
        self, step: int, evaluation: Mapping[str, float] | None, state: Callable[[], DriverState],
        record: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Saves if the step is due, or if the evaluation of its weights, if there was one, is among the best so far;
        ``state`` is called only then. ``record``: the step's own metrics, by which steps that are due are compared."""
        self.finish(wait=False)
        every = self.config.ckpt.save_steps
        is_due = every != -1 and step % every == 0
        best = self._best_with(step, {**(record or {} if is_due else {}), **(evaluation or {})})
        if best is not None or is_due:
            self.save(step, *state(), best=best)

    def _best_with(self, step: int, measured: Mapping[str, float]) -> dict[str, Any] | None:
        """What ``best.json`` will hold, if this step is one of the ``ckpt.keep_best`` best."""
        name = self.config.ckpt.best_metric_key
        if not name or name not in measured:
            return None
        before, value = best_of(self._pending_best() or self.store.best(), name), float(measured[name])
        # of equals the earlier one; a step that is made again takes its own place
        kept = [pair for pair in before if pair[0] != step]
        kept = sorted([*kept, (step, value)], key=lambda pair: (-pair[1], pair[0]))[: self.config.ckpt.keep_best]
        return best_content(name, kept) if (step, value) in kept else None

    def _pending_best(self) -> dict[str, Any] | None:
        return None if self._pending is None else self._pending.best

    def save(
        self, step: int, state: dict[str, Any], arrays: Mapping[str, np.ndarray], best: dict[str, Any] | None = None
    ) -> None:
        """Writes the checkpoint of a step, in the forms that are asked for."""
        resumable = not self.config.ckpt.disable_ds
        if resumable:
            self._save_resumable(step, state, arrays, best, self.config.ckpt.async_enable)
        if self.config.ckpt.save_hf:
            self._save_hf(step)
        if best is not None and not resumable:
            self.store.mark_best(best)
        self.store.rotate()

    def _save_hf(self, step: int) -> None:
        group_name, policy = next(iter(self.groups.items()))
        path = f"{self.store.path_of(step)}_hf"
        write_hf(policy, group_name, path, "ckpt.path", self.timeout_s)

    def save_before_the_end(self, state: DriverState, timeout_s: float) -> None:
        """Makes sure that there is a checkpoint of the step of ``state``; nothing is written afterwards. Raises
        RanksTimeoutError: the ranks needed more than ``timeout_s`` seconds."""
        step, self.timeout_s = state[0]["step"], timeout_s
        if self.config.ckpt.disable_ds:
            logger.warning("no checkpoint is written: ckpt.disable_ds is set")
            return
        self.finish()
        if not self.store.path_of(step).exists():
            self._save_resumable(step, *state, best=None, background=False)
            self.store.rotate()

    def _save_resumable(
        self, step: int, state: dict[str, Any], arrays: Mapping[str, np.ndarray], best: dict[str, Any] | None,
        background: bool,
    ) -> None:  # fmt: skip
        self.finish()
        pending, folder = _Pending(step, time.monotonic(), best), self.store.begin(step)
        try:
            entries = [
                write_plain(folder, CONTROLLER, {**state, **self.constants}),
                write_file(folder, GROUPS, [safetensors.numpy.save(dict(arrays))]),
                write_file(folder, CONFIG, [format_config(self.config).encode()]),
            ]
            parts: list[str] = []
            arguments = {"folder": str(folder), "background": background}
            for name, group in self.groups.items():
                files = call_ranks(group, name, "save_state", self.timeout_s, name=name, **arguments)
                parts += [f"{name}-{rank}" for rank in range(len(files))]
                entries += [] if background else [entry for part in files for entry in part]
            manifest = Manifest(step, tuple(entries), {**self._about(), "best": best or self.store.best()})
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
        """Completes a checkpoint that was written in the background, if it is there; asks nobody."""
        if self._pending is not None and (manifest := self.store.complete(self._pending.step)) is not None:
            self._announce(self._pending, manifest)

    def finish(self, wait: bool = True) -> None:
        """Completes a checkpoint that is being written in the background, without ``wait`` only if all ranks are done;
        either way it is an error if one could not write."""
        self.poll()
        pending = self._pending
        if pending is None:
            return
        try:
            for name, group in self.groups.items():
                if not all(call_ranks(group, name, "has_saved", self.timeout_s, wait=wait)):
                    return
            self.store.await_receipts(pending.step)
        except BaseException:
            self._pending = None
            self.store.abandon(pending.step)
            raise
        self.poll()

    def _announce(self, pending: _Pending, manifest: Manifest) -> None:
        """What follows when a checkpoint is complete."""
        self._pending = None
        is_best = {}
        if pending.best is not None:
            self.store.mark_best(pending.best)
            place, metric = [step for step, _ in best_of(pending.best)].index(pending.step), pending.best["metric"]
            value = best_of(pending.best)[place][1]
            said = "the best" if place == 0 else f"number {place + 1} of the best"
            logger.info("step %d is %s so far: %s = %.4f", pending.step, said, metric, value)
            is_best = {"best": {metric: value}}
        self.store.rotate()
        seconds, size = time.monotonic() - pending.started, manifest.size / 2**20
        path = self.store.path_of(manifest.step)
        logger.info("wrote the checkpoint %s (%.1f MiB, %.1f s)", path, size, seconds)
        self._events.note("checkpoint", of_step=pending.step, path=str(path), mib=size, seconds=seconds, **is_best)

    def _about(self) -> dict[str, Any]:
        """What the manifest says for people."""
        versions = {name: version(name) for name in ("torch", "megatron-core", "safetensors")}
        estimator = self.config.algo.advantage.estimator
        model = redact(str(self.config.actor.model_name_or_path))
        return {"model": model, "estimator": estimator, "versions": versions}


# ---- groups that wait for training ----------------------------------------------------------------------------------


def plain_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], Arrays]:
    """Groups as plain values, and their tokens, log-probs and entropies as arrays."""
    return [_plain(group) for group in groups], _arrays([one for group in groups for one in group.responses])


def _plain(group: Group) -> dict[str, Any]:
    """A group without its tokens and log-probs."""
    responses = [
        {
            "actions": response.actions, "versions": response.versions, "reward": response.reward,
            "score": response.score, "truncated": response.truncated, "extra_logs": response.extra_logs,
            "tokens": len(response.tokens_S),
            "logprobs": None if response.logprobs_T is None else len(response.logprobs_T),
            "entropies": None if response.entropies_T is None else len(response.entropies_T),
            "from_guide": response.from_guide,
        }
        for response in group.responses
    ]  # fmt: skip
    return {"prompt": vars(group.prompt), "responses": responses}


def _arrays(responses: Sequence[Response]) -> Arrays:
    """Tokens and log-probs of all, one response behind the other."""
    tokens = [response.tokens_S for response in responses]
    logprobs = [response.logprobs_T for response in responses if response.logprobs_T is not None]
    entropies = [response.entropies_T for response in responses if response.entropies_T is not None]
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *tokens]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *logprobs]),
        "entropies": np.concatenate([np.zeros(0, np.float32), *entropies]),
    }


def groups_from_plain(plain: Sequence[Mapping[str, Any]], arrays: Arrays) -> list[Group]:
    """The reverse of :func:`plain_groups`."""
    used = dict.fromkeys(arrays, 0)

    def take(name: str, count: int | None) -> np.ndarray | None:
        if count is None:
            return None
        start = used[name]
        used[name] += count
        return arrays[name][start : start + count]

    def response(r: dict[str, Any]) -> Response:
        tokens_S = take("tokens", r.pop("tokens"))
        assert tokens_S is not None
        # 0.2 and before have no entropies
        logprobs_T, entropies_T = take("logprobs", r.pop("logprobs")), take("entropies", r.pop("entropies", None))
        return Response(tokens_S=tokens_S, logprobs_T=logprobs_T, entropies_T=entropies_T, **r)

    return [Group(Prompt(**g["prompt"]), [response(dict(r)) for r in g["responses"]]) for g in plain]


# ---- options --------------------------------------------------------------------------------------------------------


def plain_options(config: RunConfig) -> dict[str, str]:
    """Every option that is not a secret, as text by its name, without passwords of addresses."""
    options = {name: value_of(config, name) for name, option in option_table().items() if not option.info.secret}
    return {name: redact(repr(value)) for name, value in options.items()}


def report_changed_options(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Logs the options that differ from those of the run that wrote the checkpoint."""
    before = {name: redact(value) for name, value in before.items()}  # an earlier release wrote passwords down
    names = [n for n in sorted(now) if before.get(n) not in (None, now[n]) and not n.startswith(_IMMATERIAL)]
    for name in names:
        logger.warning("resuming with another %s: %s, it was %s", name, now[name], before[name])


# ---- going on --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that this run goes on from; ``state`` and ``arrays`` are those of ``TrainingLoop.state``."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    arrays: Arrays


def prepare_folder(config: RunConfig) -> None:
    """Makes the folders ready: what is half-written goes; a run that starts anew finds no final model of another one.
    Raises CheckpointError: the folder cannot be changed."""
    store = checkpoint_store(config)
    try:
        _finish_interrupted(config, store)
        if not (config.ckpt.load_enable and store.checkpoints()):
            for folder in (config.ckpt.output_dir, f"{config.ckpt.output_dir}_critic"):
                if (aside := set_aside_hf(folder)) is not None:
                    logger.warning("%s holds the final model of an earlier run, which is moved to %s", folder, aside)
    except OSError as error:
        raise CheckpointError(
            f"ckpt.path {store.folder} or ckpt.output_dir {config.ckpt.output_dir} cannot be used: {error}"
        ) from error


def check_shared_folders(config: RunConfig, policy: RankGroup) -> None:
    """What the run will write can be seen by all that must: said at the start, not when the last weights are lost.
    Raises CheckpointError: a folder of the driver's is not the one that the ranks see under its name."""
    ckpt = config.ckpt
    folders = {"ckpt.output_dir": ckpt.output_dir}
    if ckpt.save_steps != -1 or ckpt.best_metric_key or ckpt.load_enable:
        folders["ckpt.path"] = ckpt.path
    for option, folder in folders.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, prefix=".seen-by-all-") as file:
            seen = call_ranks(policy, "policy", "sees", config.train.step_timeout_s, path=file.name)
        # Hugging Face checkpoints are written by rank 0, the others by all
        blind = [rank for rank, sees in enumerate(seen) if not sees and (rank == 0 or option == "ckpt.path")]
        if blind:
            raise CheckpointError(
                f"{option} must be on storage that all nodes and the driver share: a file that the driver has written "
                f"to {folder} is not seen by the policy's ranks {blind}"
            )


def clean_up(config: RunConfig) -> None:
    """Leaves nothing half-written; call it when every process of the run has ended."""
    store = checkpoint_store(config)
    try:
        _finish_interrupted(config, store)
    except (OSError, InputError) as error:
        logger.error("something half-written may be left in %s or %s: %s", store.folder, config.ckpt.output_dir, error)


def _finish_interrupted(config: RunConfig, store: CheckpointStore) -> None:
    store.clean()
    final = config.ckpt.output_dir
    for folder in (Path(final), Path(f"{final}_critic"), *store.folder.glob("global_step*_hf")):
        finish_interrupted(folder)


def restore(config: RunConfig, groups: Mapping[str, RankGroup]) -> Resumed | None:
    """Loads the newest checkpoint into the ranks, if ``ckpt.load_enable`` asks for it and there is one. Raises
    CheckpointError: it is damaged (and ``ckpt.fallback_enable`` is off, or no other is good), or does not fit."""
    if not config.ckpt.load_enable:
        return None
    store, timeout_s = checkpoint_store(config), config.train.step_timeout_s
    if not store.checkpoints():
        logger.info("no checkpoint in %s yet: the run starts from the beginning", store.folder)
        for folder in sorted({path.parent for path in store.folder.glob("superseded.*/global_step*")}):
            logger.warning("checkpoints of an earlier run are in %s: to go on from them, move them back", folder)
        return None
    folder = find_good(store, groups, timeout_s, fallback=config.ckpt.fallback_enable)
    if not (folder / GROUPS).is_file():
        raise CheckpointError(
            f"{folder} holds no {GROUPS}: it was written by an earlier release, whose place in the data means nothing "
            "to this one. Start a new run from weights in Hugging Face form (ckpt.save_hf, ckpt.output_dir)"
        )
    state = read_plain(folder / CONTROLLER)
    report_changed_options(state["options"], plain_options(config))
    for name, group in groups.items():
        if not (folder / name).is_dir():
            raise CheckpointError(f"{folder} holds no {name}: it was written by a run without one")
        call_ranks(group, name, "load_state", timeout_s, folder=str(folder), name=name)
    store.recover_best(folder)
    logger.info("resumed from %s", folder)
    return Resumed(folder, step_of(folder), state, safetensors.numpy.load_file(folder / GROUPS))


def find_good(store: CheckpointStore, groups: Mapping[str, RankGroup], timeout_s: float, *, fallback: bool) -> Path:
    """The newest checkpoint whose files are all as they were written; the ranks share the reading. Raises
    CheckpointError: the newest one is damaged and ``fallback`` is off, or all are."""
    damaged = []
    for folder in reversed(store.checkpoints()):
        problems = _problems(folder, groups, timeout_s)
        if not problems:
            return folder
        damaged.append(f"{folder} is not usable:\n  " + "\n  ".join(problems))
        if not fallback:
            raise CheckpointError(
                f"{damaged[0]}\nAdd --ckpt.fallback_enable to go back to the newest good checkpoint, or remove the "
                "folder"
            )
        logger.error("%s\n  going back to the checkpoint before it", damaged[-1])
    raise CheckpointError("no checkpoint is usable:\n" + "\n".join(damaged))


def _problems(folder: Path, groups: Mapping[str, RankGroup], timeout_s: float) -> list[str]:
    try:
        step = read_manifest(folder).step
    except CheckpointError as error:
        return [str(error)]
    if step != step_of(folder):
        return [f"its name says step {step_of(folder)}, its {MANIFEST} step {step}: rename it to global_step{step}"]
    name, group = next(iter(groups.items()))
    parts = call_ranks(group, name, "check_checkpoint", timeout_s, folder=str(folder))
    return [problem for part in parts for problem in part]


def check_prompts(resumed: Resumed | None, fingerprint: str) -> None:
    """Refuses a checkpoint whose run had other prompts. Raises CheckpointError: it had."""
    if resumed is not None and resumed.state["prompts"] != fingerprint:
        raise CheckpointError(
            f"{resumed.folder} was written by a run with other prompts: the place in the data that it holds means "
            "nothing for these. Resume with the same data.* options and unchanged files, or start a new run from its "
            "weights with actor.model_name_or_path and another ckpt.path"
        )
