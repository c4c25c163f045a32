"""What ``tests.launch`` runs on every rank of a supervised run."""

from __future__ import annotations

from openrlhf_ext.cli import train_sft


def train(argv: list[str]) -> int:
    return train_sft.main(argv)
