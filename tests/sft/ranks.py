"""What ``tests.launch`` runs on every rank of a supervised run."""

from __future__ import annotations

from megatron.core import parallel_state

from openrlhf_ext.cli import train_sft


def train(commands: list[list[str]]) -> list[int]:
    """One run after the other, for each its exit code: to start processes takes longer than such a run."""
    codes = []
    for argv in commands:
        codes.append(train_sft.main(argv))
        parallel_state.destroy_model_parallel()
    return codes
