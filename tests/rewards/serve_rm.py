"""OpenRLHF's reward server as it is installed, on a CPU:
``python -m tests.rewards.serve_rm --reward.model_name_or_path FOLDER ...``. Its process has empty
modules in place of flash_attn and deepspeed, which a forward pass does not call."""

from __future__ import annotations

import runpy

from tests.algorithms.upstream import without_kernels

if __name__ == "__main__":
    without_kernels()
    runpy.run_module("openrlhf.cli.serve_rm", run_name="__main__", alter_sys=True)
