"""A worker extension that loads other weights than were sent, when told to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from openrlhf_ext.rollout.worker_extension import WeightSyncExtension
from tests.rollout.tiny import lose_weights

QUALIFIED_NAME = "tests.rollout.spoiled_loads.SpoilingExtension"
LOST, SWAPPED = "model.layers.1.mlp.up_proj.weight", ("k_proj.weight", "v_proj.weight")

LAYER = "model.layers.1."


class SpoilingExtension(WeightSyncExtension):
    _kind, _names = "", ()
    _before: dict[str, Tensor]

    def spoil(self, kind: str, names: tuple[str, ...] = ()) -> None:
        self._kind, self._names = kind, names

    def lose_weights(self) -> None:
        """As a sleep at level 2 does on a GPU."""
        lose_weights(self)

    def count_lost(self) -> int:
        """Parameters that have not come back."""
        return sum(
            bool(p.float().isnan().any()) for p in self.model_runner.get_model().parameters()
        )

    def connect_weight_receiver(self, plan: dict[str, Any], link: dict[str, Any]) -> None:
        super().connect_weight_receiver(plan, link)
        self._before = {}
        watch = self._held.watch
        self._held.watch = lambda stream: self._spoiled(watch(stream))

    def _spoiled(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        sent = {name: tensor.clone() for name, tensor in stream}
        loaded = dict(sent)
        if self._kind == "stale":
            loaded = self._before
        if self._kind == "lost shard" and self.rank == 1:
            loaded[LOST] = self._before[LOST]
        if self._kind == "stale layer":
            loaded |= {
                name: tensor for name, tensor in self._before.items() if name.startswith(LAYER)
            }
        if self._kind == "swapped":
            k, v = (f"model.layers.0.self_attn.{leaf}" for leaf in SWAPPED)
            loaded |= {k: sent[v], v: sent[k]}
        if self._kind == "stale ones":
            loaded |= {name: self._before[name] for name in self._names}
        if self._kind == "stale ones of one worker" and self.rank == 1:
            loaded |= {name: self._before[name] for name in self._names}
        if self._kind == "swapped pair":
            one, other = self._names
            loaded |= {one: sent[other], other: sent[one]}
        if self._kind == "left out":
            loaded = {name: tensor for name, tensor in sent.items() if name not in self._names}
        self._before = sent
        yield from loaded.items()
