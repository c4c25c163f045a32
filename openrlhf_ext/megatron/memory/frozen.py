"""Frozen weights in host memory, swapped into the policy's place for one forward pass: a reference policy, a guide.

A KL penalty compares the policy with what it was before training, mixed_policy_dapo with another checkpoint of the same
shape. Each copy costs host memory of the size of a rank's
parameters (pinned where there is a GPU: ``offload.HostArena``) and no GPU memory: the exchange goes parameter by
parameter, so what it needs on the device at any time is room for the largest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from openrlhf_ext.megatron.memory.offload import HostArena


class FrozenCopy:
    """This rank's weights as they are now, kept in host memory. Not a collective.

    Args:
        load: puts other weights into the parameters, which are then kept instead; the parameters get theirs back, bit
            for bit. It needs no more memory than the copy.
        state: other tensors that belong to the weights (``converter_state``), kept and exchanged with them.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        load: Callable[[], None] | None = None,
        state: Iterable[torch.Tensor] = (),
    ) -> None:
        self._parameters = [*dict.fromkeys(p for chunk in chunks for p in chunk.parameters()), *state]
        self._arena = HostArena(pinned=torch.cuda.is_available())
        self._copies = self._arena.places([parameter.nbytes for parameter in self._parameters])
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            for piece, own in zip(copy, _bytes(parameter, copy), strict=True):
                piece.copy_(own)
        if load is not None:
            load()
            self._exchange()

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the body the parameters hold the reference's weights; afterwards their own again, bit for bit.

        In place: views (Megatron's buffers of a distributed optimizer) stay valid. The optimizer must not step inside.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            current = parameter.detach().clone()
            for piece, own, mine in zip(copy, _bytes(parameter, copy), _bytes(current, copy), strict=True):
                # both copies run on the current stream, in this order
                own.copy_(piece, non_blocking=True)
                piece.copy_(mine, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the next exchange may come from the host


def _bytes(tensor: torch.Tensor, pieces: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of a contiguous tensor's bytes, cut as its copy is."""
    return tensor.detach().view(-1).view(torch.uint8).split([piece.numel() for piece in pieces])
