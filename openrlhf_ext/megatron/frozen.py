"""Host-memory copies of weights that are not trained: a reference policy, a guide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from openrlhf_ext.megatron.host_memory import HostArena, bytes_as


class FrozenCopy:
    """A host-memory copy of this rank's present weights, swapped in for one forward pass: a
    reference policy, a guide.

    The exchange goes parameter by parameter, so it needs device memory for the largest parameter
    only. ``load`` puts other weights into the parameters; the copy then holds those, and the
    parameters get their own weights back, bit for bit. ``state``: other tensors that belong to the
    weights (``converter_state``) and are exchanged with them.
    """

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        load: Callable[[], None] | None = None,
        state: Iterable[torch.Tensor] = (),
    ) -> None:
        self._parameters = [
            *dict.fromkeys(p for chunk in chunks for p in chunk.parameters()),
            *state,
        ]
        self._arena = HostArena(pinned=torch.cuda.is_available())
        self._copies = self._arena.places([parameter.nbytes for parameter in self._parameters])
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            for piece, own in zip(copy, bytes_as(parameter, copy), strict=True):
                piece.copy_(own)
        if load is not None:
            load()
            self._exchange()

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside the body the parameters hold the copy's weights; afterwards their own again, bit
        for bit.

        The exchange is in place, so views stay valid. The optimizer must not step inside the body.
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
            for piece, own, mine in zip(
                copy, bytes_as(parameter, copy), bytes_as(current, copy), strict=True
            ):
                # Both copies run on the current stream, in this order.
                own.copy_(piece, non_blocking=True)
                piece.copy_(mine, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the next exchange may start on the host
