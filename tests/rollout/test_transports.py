"""Which transport a run gets."""

from __future__ import annotations

import pytest

from openrlhf_ext.rollout.sync import RECEIVERS, SENDERS, choose_transport


def test_every_transport_has_both_ends() -> None:
    assert SENDERS.keys() == RECEIVERS.keys() == {"gloo", "nccl", "cuda_ipc"}
    assert all(sender.transport == name for name, sender in SENDERS.items())


@pytest.mark.parametrize(
    ("on_gpu", "colocated", "transport"),
    [(False, False, "gloo"), (False, True, "gloo"), (True, False, "nccl"), (True, True, "cuda_ipc")],
)
def test_auto_is_the_fastest_that_works(on_gpu: bool, colocated: bool, transport: str) -> None:
    assert choose_transport("auto", on_gpu=on_gpu, colocated=colocated) == transport
    assert choose_transport(transport, on_gpu=on_gpu, colocated=colocated) == transport
    assert choose_transport("gloo", on_gpu=on_gpu, colocated=colocated) == "gloo"


@pytest.mark.parametrize(
    ("asked", "on_gpu", "colocated", "says"),
    [
        ("nccl", False, False, "nccl needs GPUs(.|\n)*gloo"),
        ("cuda_ipc", False, True, "cuda_ipc needs GPUs(.|\n)*gloo"),
        ("nccl", True, True, "one rank per GPU(.|\n)*cuda_ipc"),
        ("cuda_ipc", True, False, "their own(.|\n)*nccl"),
        ("mpi", True, False, "unknown vllm.sync_backend 'mpi'"),
    ],
)
def test_what_cannot_work_is_refused_and_not_replaced(asked: str, on_gpu: bool, colocated: bool, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_transport(asked, on_gpu=on_gpu, colocated=colocated)
