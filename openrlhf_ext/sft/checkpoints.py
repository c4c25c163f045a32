"""What a driver's group of ranks is to ``run.checkpoints``, in a run without one: rank 0 calls, all
ranks answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from openrlhf_ext.checkpoints import CheckpointError, FileEntry
from openrlhf_ext.checkpoints.store import Witness
from openrlhf_ext.groups.watchdog import wait_for_all
from openrlhf_ext.inputs import InputError
from openrlhf_ext.megatron.checkpoint import check_loaded, load_checkpoint, take_snapshot
from openrlhf_ext.megatron.policy import MegatronPolicy

T = TypeVar("T")

_FAULTS = (CheckpointError, InputError, OSError)


class Ranks(Witness):
    """All ranks of a run, ``policy`` is this rank's model once it is built."""

    policy: MegatronPolicy

    def led(self, act: Callable[[], T]) -> T:
        """What ``act`` returns on rank 0; the other ranks answer its ``call``s until then. Raises
        CheckpointError, on every rank: it did."""
        told: tuple[str | None, Any, str] = (None, None, "")
        if dist.get_rank() == 0:
            try:
                told = (None, act(), "")
            except _FAULTS as error:
                told = (None, None, str(error))
        while (told := _from_first(told))[0] is not None:  # on rank 0 it is over
            self._answer(told[0], told[1])
        if told[2]:
            raise CheckpointError(told[2])
        return told[1]

    def call(self, method: str, _: float, **arguments: Any) -> list:
        """What one of the methods below returns on every rank; a ``run.checkpoints.Call``.
        Collectives have a deadline of their own. Raises CheckpointError: a rank did."""
        _from_first((method, arguments, ""))
        answers = self._answer(method, arguments)
        if faults := sorted({fault for _, fault in answers if fault}):
            raise CheckpointError("; ".join(faults))
        return [answer for answer, _ in answers]

    def _answer(self, method: str, arguments: dict[str, Any]) -> list[tuple[Any, str]]:
        mine: tuple[Any, str]
        try:
            mine = (getattr(self, method)(**arguments), "")
        except _FAULTS as error:
            mine = (None, str(error))
        wait_for_all()  # some read or write for longer than a collective may take
        answers = [mine] * dist.get_world_size()
        dist.all_gather_object(answers, mine)
        return answers

    # ---- what is called, as of ranks.actor.TrainedActor
    # -------------------------------------------------------------

    def load_state(self, folder: str, name: str) -> None:
        load_checkpoint(self.policy, Path(folder) / name)

    def check_loaded(self, folder: str, name: str) -> None:
        check_loaded(self.policy, Path(folder) / name)

    def save_state(self, folder: str, name: str, background: bool) -> list[FileEntry]:
        return take_snapshot(self.policy, copy=background).write(Path(folder), name)

    def save_model(self, path: str) -> dict[str, int]:
        return self.policy.save_hf(path)


def _from_first(told: tuple[str | None, Any, str]) -> tuple[str | None, Any, str]:
    """What rank 0 tells all ranks; it may have worked for longer than a collective may take."""
    wait_for_all()
    parts = [told]
    dist.broadcast_object_list(parts, src=0)
    return parts[0]
