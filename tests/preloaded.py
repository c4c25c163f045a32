"""What the ranks of ``tests.launch`` have imported when they are forked: what takes long, and no
module of a test."""

from __future__ import annotations

from openrlhf_ext import patches
from openrlhf_ext.imports import without_collection

patches.apply()
with without_collection():  # nor Ray: tests/gpu is also for machines that have none
    import openrlhf_ext.megatron.policy  # noqa: F401
