"""Copies of weights that are not trained, in host memory: a reference, a guide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from openrlhf_ext.megatron.host_memory import HostArena, bytes_as


class FrozenCopy:
    """This rank's weights as they are now in host memory, swapped in for one forward pass: a
    reference policy, a guide.

    The exchange goes parameter by parameter, so that it needs room on the device for the largest
    one only. ``load`` puts other weights into the parameters, which are then kept instead; the
    parameters get theirs back, bit for bit.
    ``state``: other tensors that belong to the weights (``converter_state``), exchanged with them.
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
        """Within the body the parameters hold the copy's weights, afterwards their own again, bit
        for bit. In place, so that views on them stay valid; the optimizer must not step inside."""
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
                # both copies run on the current stream, in this order
                own.copy_(piece, non_blocking=True)
                piece.copy_(mine, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the next exchange may come from the host
