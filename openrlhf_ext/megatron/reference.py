"""The reference policy as a copy of the starting weights in host memory, swapped in for one forward pass.

A KL penalty compares the policy with what it was before training. The copy costs host memory (pinned where there is a
GPU) of the size of a rank's parameters, and no GPU memory: the exchange goes parameter by parameter, so what it needs
on the device at any time is room for the largest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class HostReference:
    """This rank's weights as they are now, kept in host memory. Not a collective."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        self._parameters = list(dict.fromkeys(p for chunk in chunks for p in chunk.parameters()))
        self._copies = [_to_host(parameter) for parameter in self._parameters]

    @property
    def nbytes(self) -> int:
        """Host memory of the copy, bytes."""
        return sum(copy.nbytes for copy in self._copies)

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
            # both copies run on the current stream, in this order
            parameter.copy_(copy, non_blocking=True)
            copy.copy_(current, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the next exchange may come from the host


def _to_host(parameter: torch.nn.Parameter) -> torch.Tensor:
    copy = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(parameter.detach())
