"""Going on where an earlier run stopped: which checkpoint, what the ranks take from it, restarts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import safetensors.numpy

from openrlhf_ext.checkpoints import CheckpointError, CheckpointStore, read_manifest
from openrlhf_ext.checkpoints.plain import read_plain
from openrlhf_ext.checkpoints.store import MANIFEST, step_of
from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.about import checkpoint_store
from openrlhf_ext.driver.checkpoints import (
    CONTROLLER,
    GROUPS,
    Arrays,
    plain_options,
    saves_checkpoints,
)
from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.model.hf_files import finish_interrupted, set_aside_hf
from openrlhf_ext.redaction import redact

if TYPE_CHECKING:
    from openrlhf_ext.driver.placement import RankGroup

logger = logging.getLogger(__name__)

# options whose change between two parts of a run says nothing about the training
_IMMATERIAL = ("ckpt.", "logger.", "profile.", "dry_run", "train.max_restarts", "train.step_timeout_s")


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that this run goes on from; ``state`` and ``arrays`` are those of ``TrainingLoop.state``."""

    folder: Path
    step: int
    state: Mapping[str, Any]
    arrays: Arrays


# ---- before training ------------------------------------------------------------------------------------------------


def prepare_folder(config: RunConfig) -> None:
    """Makes the folders ready: what is half-written goes; a run that starts anew finds no final model of another one.

    Raises:
        CheckpointError: the folder cannot be changed.
    """
    store = checkpoint_store(config)
    try:
        _finish_interrupted(config, store)
        if not (config.ckpt.load_enable and store.checkpoints()):
            _set_aside_final(config.ckpt.output_dir)
    except OSError as error:
        raise CheckpointError(
            f"ckpt.path {store.folder} or ckpt.output_dir {config.ckpt.output_dir} cannot be used: {error}"
        ) from error


def _set_aside_final(output_dir: str) -> None:
    for folder in (output_dir, f"{output_dir}_critic"):
        if (aside := set_aside_hf(folder)) is not None:
            logger.warning("%s holds the final model of an earlier run, which is moved to %s", folder, aside)


def check_shared_folders(config: RunConfig, policy: RankGroup) -> None:
    """What the run will write can be seen by all that must: said at the start, not when the last weights are lost.

    Raises:
        CheckpointError: a folder of the driver's is not the one that the ranks see under its name.
    """
    ckpt = config.ckpt
    folders = {"ckpt.output_dir": ckpt.output_dir}
    if saves_checkpoints(config) or ckpt.load_enable:
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
    """Loads the newest checkpoint into the ranks, if ``ckpt.load_enable`` asks for it and there is one.

    Args:
        groups: of ranks that are trained, by name.

    Raises:
        CheckpointError: it is damaged (and ``ckpt.fallback_enable`` is off, or no other is good), or does not fit.
    """
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
    """The newest checkpoint whose files are all as they were written; the ranks share the reading.

    Raises:
        CheckpointError: the newest one is damaged and ``fallback`` is off, or all are.
    """
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


# ---- the prompts -----------------------------------------------------------------------------------------------------


def check_prompts(resumed: Resumed | None, fingerprint: str) -> None:
    """Refuses a checkpoint whose run had other prompts.

    Raises:
        CheckpointError: it had.
    """
    if resumed is not None and resumed.state["prompts"] != fingerprint:
        raise CheckpointError(
            f"{resumed.folder} was written by a run with other prompts: the place in the data that it holds means "
            "nothing for these. Resume with the same data.* options and unchanged files, or start a new run from its "
            "weights with actor.model_name_or_path and another ckpt.path"
        )


# ---- options --------------------------------------------------------------------------------------------------------


def report_changed_options(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Logs the options that differ from those of the run that wrote the checkpoint."""
    before = {name: redact(value) for name, value in before.items()}  # an earlier release wrote passwords down
    names = [n for n in sorted(now) if before.get(n) not in (None, now[n]) and not n.startswith(_IMMATERIAL)]
    for name in names:
        logger.warning("resuming with another %s: %s, it was %s", name, now[name], before[name])
