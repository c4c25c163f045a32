"""What a Ray actor that trains a Megatron model needs for checkpoints: its rank's part of saving, checking, loading."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from openrlhf_ext.checkpoints import FileEntry, check_files, deal_files, read_manifest
from openrlhf_ext.checkpoints.files import VISIBLE_S, absent_files
from openrlhf_ext.megatron.deadlines.watchdog import phase

if TYPE_CHECKING:
    from openrlhf_ext.megatron.decoder import MegatronModel


class CheckpointedRank:
    """Mixin of actor classes. The group calls every method on all ranks."""

    _writing: Future | None = None
    _writer: ThreadPoolExecutor | None = None

    # ---- what a subclass says of itself

    def checkpointed_model(self) -> MegatronModel:
        """The model whose state is saved and loaded, on its device."""
        raise NotImplementedError

    def release_model(self) -> None:
        """Called when ``checkpointed_model`` is not needed any more."""

    def extra_state(self) -> dict[str, Any]:
        """Plain values that belong to the actor; rank 0's are kept."""
        return {}

    def load_extra_state(self, extra: dict[str, Any]) -> None:
        """Takes back what ``extra_state`` gave."""

    # ---- remote calls

    def save_state(self, folder: str, name: str, background: bool) -> list[FileEntry] | None:
        """Writes this rank's part of the model ``name`` below ``folder``.

        Args:
            background: return as soon as the state is copied to host memory; ``saved_files`` then tells when it is
                written.

        Returns:
            The files written; None if they are still being written.
        """
        from openrlhf_ext.megatron.checkpoint import take_snapshot

        with phase("collecting a checkpoint"):
            snapshot = take_snapshot(self.checkpointed_model(), self.extra_state(), copy=background)
        if not background:
            entries = snapshot.write(Path(folder), name)
            self.release_model()
            return entries
        self.release_model()
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = self._writer.submit(snapshot.write, Path(folder), name)
        return None

    def saved_files(self, wait: bool) -> list[FileEntry] | None:
        """The files of the last background save; None if it is not finished and ``wait`` is off.

        Raises:
            CheckpointError: writing failed.
        """
        if not wait and not self._writing.done():
            return None
        return self._writing.result()

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

        self.load_extra_state(load_checkpoint(self.checkpointed_model(), Path(folder) / name))
        self.release_model()
