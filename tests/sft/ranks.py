"""What ``tests.launch`` runs on every rank of a supervised run."""

from __future__ import annotations

import logging

from megatron.core import parallel_state

from openrlhf_ext.cli import train_sft


def train(commands: list[list[str]]) -> tuple[list[int], list[str]]:
    """One run after the other, for each its exit code, and what is said: to start processes takes
    longer than a run."""
    codes: list[int] = []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("openrlhf_ext").addHandler(handler)
    for argv in commands:
        codes.append(train_sft.main(argv))
        parallel_state.destroy_model_parallel()
    return codes, said
