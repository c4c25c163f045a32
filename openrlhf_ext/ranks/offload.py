"""What a Ray actor that trains needs in a colocated run: its model's states leave the GPU and come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrlhf_ext.megatron.decoder import MegatronModel
    from openrlhf_ext.megatron.memory.offload import Swap


class SleepingRank:
    """Mixin of actor classes. States come back on demand: a method begins with ``reload_states`` of what it needs."""

    def watch_states(self, model: MegatronModel, sleeps: bool) -> None:
        """Call once, when the model is built.

        Args:
            sleeps: whether others need the memory (``ds.enable_sleep``).
        """
        from openrlhf_ext.megatron.memory.offload import ModelStates

        self.states, self.sleeps = ModelStates(model.models, model.optimizer, model.device), sleeps
        self.offloads: list[Swap] = []
        self.reloads: list[Swap] = []

    def offload_states(self, *kinds: str) -> None:
        """Moves states (``megatron.offload.KINDS``; none named: all) to host memory. Not a collective."""
        self.offloads.append(self.states.offload(*kinds))

    def reload_states(self, *kinds: str) -> None:
        """Moves states back, if they are away. Not a collective."""
        self.reloads.append(self.states.reload(*kinds))

    def release_model(self) -> None:
        """Others may need the memory, and nothing needs the model right now (also ``CheckpointedRank``)."""
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
