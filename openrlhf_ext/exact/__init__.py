"""Exact mode (``train.exact_rollout_enable``): policy ranks and engines compute the log-prob of a
sampled token with the same operations, so both have the same bits (docs/exact.md)."""

from __future__ import annotations

VARIABLE = "OPENRLHF_EXT_EXACT"
"""Set to 1 in the processes of exact engines, which then import ``exact.engine``."""
TESTED_VLLM = "0.32.0"
"""The engine's half replaces functions of vLLM, and the policy's half calls its kernels."""
LEAST_QUERIES = 128
"""Of a sequence, as flash attention is told on GPUs by policy and engine, at least. For fewer it
takes other tiles of keys at some head sizes, so that a generated token would not have the bits of
the same token in a prompt (vllm-project/flash-attention hopper/tile_size.h, flash_api.cpp)."""


class NotExact(RuntimeError):
    """Policy and engine do not compute the same bits, or this process cannot compute them."""
