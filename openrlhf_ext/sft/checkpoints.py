"""Checkpoints that a supervised run goes on from, in the form of ``megatron.checkpoint`` and of a run's folder."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from openrlhf_ext.checkpoints import (
    CheckpointError,
    CheckpointStore,
    FileEntry,
    Manifest,
    check_files,
    deal_files,
    read_manifest,
    write_file,
)
from openrlhf_ext.checkpoints.files import read_plain, write_plain
from openrlhf_ext.checkpoints.store import step_of
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.show import format_options
from openrlhf_ext.megatron.checkpoint import load_checkpoint, take_snapshot
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.watchdog import wait_for_all
from openrlhf_ext.redaction import redact

logger = logging.getLogger(__name__)

_MODEL, _STATE, _CONFIG = "model", "controller.json", "config.yaml"


class Checkpoints:
    """Those of ``ckpt.path``; ``examples``: fingerprint of the run's, whose order a place in the data is of."""

    def __init__(self, config: SupervisedConfig, policy: MegatronPolicy, examples: str) -> None:
        self.config, self.policy, self.examples = config, policy, examples
        self.store = CheckpointStore(config.ckpt.path, config.ckpt.max_num, config.ckpt.max_mem * 1e9)

    def resume(self) -> int:
        """Loads the newest checkpoint, if ``ckpt.load_enable`` asks for it and there is one; the steps that were made.
        Raises CheckpointError, on every rank: it is damaged, of another model, or of other examples."""
        if dist.get_rank() == 0:
            self.store.clean()
            if not self.config.ckpt.load_enable and (aside := self.store.set_aside_all()) is not None:
                logger.warning("checkpoints of an earlier run are moved to %s", aside)
        wait_for_all()
        newest = self.store.checkpoints()[-1:] if self.config.ckpt.load_enable else []
        if not newest:
            return 0
        folder = newest[0]
        shares = deal_files(read_manifest(folder).files, dist.get_world_size())
        problems = self._everyones(check_files(folder, shares[dist.get_rank()]))
        if problems:
            raise CheckpointError(
                f"{folder} is not usable:\n  " + "\n  ".join(problems) + "\nRemove the folder to go on from the "
                "checkpoint before it"
            )
        if read_plain(folder / _STATE)["examples"] != self.examples:
            raise CheckpointError(
                f"{folder} was written by a run with other examples: the place in the data that it holds means nothing "
                "for these. Resume with the same data.* options and unchanged files, or start a new run from its "
                "weights with model.model_name_or_path and another ckpt.path"
            )
        load_checkpoint(self.policy, folder / _MODEL)
        if dist.get_rank() == 0:
            logger.info("resumed from %s", folder)
        return step_of(folder)

    def save(self, step: int, ends: bool) -> None:
        """Writes the checkpoint of a step in the forms that are asked for; a run that ``ends`` early leaves one that it
        can go on from. Raises CheckpointError."""
        if not self.config.ckpt.disable_ds:
            self._save_resumable(step)
        if self.config.ckpt.save_hf and not ends:
            self.policy.save_hf(f"{self.store.path_of(step)}_hf")
        if dist.get_rank() == 0:
            self.store.rotate()
        wait_for_all()

    def _save_resumable(self, step: int) -> None:
        first = dist.get_rank() == 0
        if first:
            self.store.begin(step)
        wait_for_all()
        folder = self.store.path_of(step).with_name(f"global_step{step}.incomplete")
        written = self._everyones(take_snapshot(self.policy, copy=False).write(folder, _MODEL))
        if first:
            state = {"step": step, "examples": self.examples}
            entries: list[FileEntry] = [
                write_plain(folder, _STATE, state),
                write_file(folder, _CONFIG, [format_options(self.config).encode()]),
                *written,
            ]
            self.store.commit(Manifest(step, tuple(entries), self._about()))
        wait_for_all()

    def _about(self) -> dict[str, Any]:
        versions = {name: version(name) for name in ("torch", "megatron-core", "safetensors")}
        return {"model": redact(str(self.config.model.model_name_or_path)), "versions": versions}

    def _everyones(self, mine: list) -> list:
        parts: list[list] = [[]] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return [entry for part in parts for entry in part]
