"""What Ray actors that train have in common: their states leave the GPU and come back, are saved, checked and loaded.

In a colocated run a model is on the device while it is needed. States come back on demand: a method begins with
``reload_states`` of what it needs, and ends with ``release_model``.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from openrlhf_ext.checkpoints import FileEntry, check_files, deal_files, read_manifest
from openrlhf_ext.checkpoints.files import VISIBLE_S, absent_files
from openrlhf_ext.checkpoints.store import write_receipt
from openrlhf_ext.megatron.watchdog import phase
from openrlhf_ext.ranks.actor import RankActor

if TYPE_CHECKING:
    from openrlhf_ext.megatron.checkpoint import Snapshot
    from openrlhf_ext.megatron.critic import MegatronCritic
    from openrlhf_ext.megatron.host_memory import Swap
    from openrlhf_ext.megatron.policy import MegatronPolicy


class TrainedActor(RankActor):
    """One rank of a model that is trained. The group calls every method on all ranks."""

    _writing: Future | None = None
    _writer: ThreadPoolExecutor | None = None

    def hold(self, model: MegatronPolicy | MegatronCritic, sleeps: bool) -> None:
        """Call once, when the model is built.

        Args:
            sleeps: whether others need the memory (``ds.enable_sleep``).
        """
        from openrlhf_ext.megatron.host_memory import ModelStates

        self._model, self.sleeps = model, sleeps
        self.states = ModelStates(model.models, model.optimizer, model.device, model.settings.converters)
        self.offloads: list[Swap] = []
        self.reloads: list[Swap] = []

    def offload_states(self, *kinds: str) -> None:
        """Moves states (``megatron.host_memory.KINDS``; none named: all) to host memory. Not a collective."""
        self.offloads.append(self.states.offload(*kinds))

    def reload_states(self, *kinds: str) -> None:
        """Moves states back, if they are away. Not a collective."""
        self.reloads.append(self.states.reload(*kinds))

    def release_model(self) -> None:
        """Others may need the memory, and nothing needs the model right now."""
        if self.sleeps:
            self.offload_states()

    def take_swaps(self) -> dict[str, float]:
        """What moved since the last call; nothing if the model does not sleep."""
        offloads, reloads = self.offloads, self.reloads
        self.offloads, self.reloads = [], []
        if not self.sleeps:
            return {}
        return {
            "offload/freed_mib": sum(swap.measured_bytes for swap in offloads) / 2**20,
            "offload/seconds": sum(swap.seconds for swap in offloads),
            "offload/reload_seconds": sum(swap.seconds for swap in reloads),
        }

    def whole_model(self) -> MegatronPolicy | MegatronCritic:
        """The model with all of its states on its device."""
        self.reload_states()
        return self._model

    def save_model(self, path: str) -> dict[str, int]:
        """Writes the model as an HF checkpoint; returns the sizes of its files on rank 0."""
        self.reload_states("parameters")
        return self._model.save_hf(path)

    # ---- resumable checkpoints --------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """Plain values that belong to the actor; rank 0's are kept."""
        return {}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Takes back what ``extra_state`` gave."""

    def save_state(self, folder: str, name: str, background: bool) -> list[FileEntry] | None:
        """Writes this rank's part of the model ``name`` below ``folder``.

        Args:
            background: return as soon as the state is copied to host memory; ``has_saved`` then tells when it is
                written, and a receipt in the folder (``write_receipt``).

        Returns:
            The files written; None if they are still being written.
        """
        from openrlhf_ext.megatron.checkpoint import take_snapshot

        with phase("collecting a checkpoint"):
            snapshot = take_snapshot(self.whole_model(), self.extra_state(), copy=background)
        if not background:
            entries = snapshot.write(Path(folder), name)
            self.release_model()
            return entries
        self.release_model()
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        part = f"{name}-{dist.get_rank()}"
        self._writing = self._writer.submit(_write_with_receipt, snapshot, Path(folder), name, part)
        return None

    def has_saved(self, wait: bool) -> bool:
        """Whether the last background save is written; ``wait`` makes sure that it is.

        Raises:
            CheckpointError: writing failed.
        """
        if self._writing is None:
            raise RuntimeError("has_saved() tells of a background save, and none was begun")
        if done := wait or self._writing.done():
            self._writing.result()
        return done

    def sees(self, path: str) -> bool:
        """Whether an empty file that the driver has just made is here. Not a collective."""
        return not absent_files(Path(path).parent, {Path(path).name: 0}, VISIBLE_S)

    def check_checkpoint(self, folder: str) -> list[str]:
        """What is wrong with this rank's share of a checkpoint's files: each rank reads some, together they read all.

        Raises:
            CheckpointError: the manifest cannot be read.
        """
        shares = deal_files(read_manifest(Path(folder)).files, dist.get_world_size())
        return check_files(Path(folder), shares[dist.get_rank()])

    @phase("loading a checkpoint")
    def load_state(self, folder: str, name: str) -> None:
        """Loads the model ``name`` of a checkpoint.

        Raises:
            CheckpointError: it does not fit the model.
        """
        from openrlhf_ext.megatron.checkpoint import load_checkpoint

        self.load_extra_state(load_checkpoint(self.whole_model(), Path(folder) / name))
        self.release_model()


def _write_with_receipt(snapshot: Snapshot, folder: Path, name: str, part: str) -> None:
    write_receipt(folder, part, snapshot.write(folder, name))
