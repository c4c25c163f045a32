"""The moving average of the policy's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from openrlhf_ext.megatron.host_memory import HostArena, synchronize

_BLOCK_ENTRIES = 1 << 24  # entries of the moving average on the device at a time


class MovingAverage:
    """The moving average of this rank's trained weights, fp32 in host memory.

    After each update it is ``beta average + (1 - beta) weights``. The device computes it block by
    block: keeping it on the device would take 4 bytes per parameter, and the host's cores need
    seconds for what a transfer over the bus does in tenths of a second (pinned memory, no wait in
    between).
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], beta: float) -> None:
        self._beta = beta
        self._parameters = list(
            dict.fromkeys(p for chunk in chunks for p in chunk.parameters() if p.requires_grad)
        )
        self._arena = HostArena(pinned=torch.cuda.is_available())
        places = self._arena.places([4 * parameter.numel() for parameter in self._parameters])
        self._averages = dict(zip(map(id, self._parameters), places, strict=True))
        self.restart()

    def restart(self) -> None:
        """Restarts the average from the present weights."""
        self._pass_over(lambda average_n, weight_n: average_n.copy_(weight_n))

    def update(self) -> None:
        """Queues the update; the host does not wait for it."""
        self._pass_over(
            lambda average_n, weight_n: average_n.lerp_(weight_n.float(), 1 - self._beta)
        )

    @torch.no_grad()
    def _pass_over(self, change: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        for parameter in self._parameters:
            weight_N, first = parameter.detach().view(-1), 0
            for block_n in self._blocks(parameter):
                here_n = block_n.to(parameter.device, non_blocking=True)
                change(here_n, weight_N[first : first + block_n.numel()])
                if here_n is not block_n:
                    block_n.copy_(here_n, non_blocking=True)
                first += block_n.numel()

    def _blocks(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        for piece in self._averages[id(parameter)]:
            yield from piece.view(torch.float32).split(_BLOCK_ENTRIES)

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a CPU copy of the average, in the parameter's shape."""
        synchronize(parameter.device)
        return torch.cat([*self._blocks(parameter)]).view(parameter.shape)

    def put(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Replaces the average of the parameter by ``values``."""
        synchronize(parameter.device)
        blocks = [*self._blocks(parameter)]
        for block_n, values_n in zip(
            blocks, values.reshape(-1).split([len(b) for b in blocks]), strict=True
        ):
            block_n.copy_(values_n)
