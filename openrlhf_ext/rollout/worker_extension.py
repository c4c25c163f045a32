"""What vLLM's workers learn: to join a weight-sync group and to replace their weights from it.

vLLM imports this module inside every worker process (`worker_extension_cls`) and mixes the class into its worker, so
names must not clash with those of `vllm.v1.worker`; imports stay at torch and vLLM.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from openrlhf_ext.patches.vllm_tied_head import repack_tied_heads
from openrlhf_ext.rollout.fp8 import require_fp8
from openrlhf_ext.rollout.held_weights import HeldWeights
from openrlhf_ext.rollout.sync.base import Link, WeightStreamAborted, WeightSyncError
from openrlhf_ext.rollout.sync.plan import BucketPlan
from openrlhf_ext.rollout.sync.stream import WeightReceiver

QUALIFIED_NAME = "openrlhf_ext.rollout.worker_extension.WeightSyncExtension"


class WeightSyncExtension:
    """Mixed into vLLM's worker, which provides the first four attributes."""

    rank: int
    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    _weight_receiver: WeightReceiver | None = None
    _held: HeldWeights
    _bf16_layers: list[int] | None = None

    def prove_fp8(self, bf16_layers: list[int]) -> None:
        """Look at every linear layer, now and after every update.

        Args:
            bf16_layers: decoder layers that are not FP8.

        Raises:
            NotFP8: see `require_fp8`.
        """
        self._bf16_layers = bf16_layers
        require_fp8(self.model_runner.get_model(), bf16_layers)

    def connect_weight_receiver(self, plan: dict[str, Any], link: dict[str, Any]) -> None:
        """Join the sender's group as this worker's number within its engine says."""
        self.disconnect_weight_receiver()
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_worth_telling)
        agreed = BucketPlan.from_wire(plan)
        self._weight_receiver = WeightReceiver.connect(agreed, Link(**link), self.rank)
        workers = self.vllm_config.parallel_config.tensor_parallel_size
        self._held = HeldWeights(self.model_runner.get_model(), agreed, workers)

    def disconnect_weight_receiver(self) -> None:
        """Leave the group; a no-op outside of one."""
        if self._weight_receiver is not None:
            self._weight_receiver.close()
            self._weight_receiver = None

    def replace_weights(self, version: int) -> tuple[float, list[tuple[int, int, bool]]]:
        """Receive and load a whole update.

        After an error the weights are a mixture of two versions: the caller must not sample until an update succeeds
        (`RolloutEngine.receive_weights` sees to that). A sender that gave up can start again; after any other error the
        group has to be connected anew.

        Returns:
            Seconds spent loading and summing, the rest having been spent waiting for weights; `HeldWeights.sums`.
        """
        if self._weight_receiver is None:
            raise WeightSyncError("this engine has not joined a weight-sync group, or has left it after an error")
        start = time.monotonic()
        try:
            self.reload_weights(weights_iterator=self._held.watch(self._weight_receiver.receive(version)))
            repack_tied_heads(self.model_runner.get_model())
            if self._bf16_layers is not None:
                self.prove_fp8(self._bf16_layers)
            sums = self._held.sums()
        except Exception as error:
            if not isinstance(error, WeightStreamAborted):
                self.disconnect_weight_receiver()
            self._recover_from_partial_reload()
            raise
        return time.monotonic() - start - self._weight_receiver.waited_s, sums

    def _recover_from_partial_reload(self) -> None:
        # A layer that has got some of its tensors would take those for part of the next update
        # (vllm reload/layerwise.py: "Skip if the layer has already been initialized").
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Rotary embeddings have buffers and nothing in a checkpoint; vLLM warns about them at every reload."""
    return "RotaryEmbedding: Failed to load weights" not in record.getMessage()
