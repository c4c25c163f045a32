"""How the policy hands its weights to the engines: a module for each transport, named as in
``vllm.sync_backend``."""

from __future__ import annotations

from importlib import import_module

from openrlhf_ext.rollout.sync.base import Transport


def find_transport(name: str) -> Transport:
    """A module of this folder, or the dotted path of one that engine workers can import too. Raises
    ValueError."""
    path = name if "." in name else f"{__name__}.{name}"
    try:
        transport = getattr(import_module(path), "TRANSPORT", None)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        transport = None
    if not isinstance(transport, Transport):
        raise ValueError(
            f"unknown weight-sync transport {name!r}: there is no module {path} with a TRANSPORT"
        )
    return transport


def choose_transport(
    asked: str, *, on_gpu: bool, colocated: bool, deterministic: bool = False
) -> str:
    """The transport that ``vllm.sync_backend`` stands for on this machine; ValueError if it cannot
    work here.

    Batch-invariant engines (``deterministic``) have other settings of NCCL than the policy (vllm
    0.32.0 model_executor/determinism/batch_invariant.py:1405), and ranks of one communicator must
    agree.
    """
    if asked == "auto":
        return (
            ("cuda_ipc" if colocated else "gloo" if deterministic else "nccl") if on_gpu else "gloo"
        )
    if find_transport(asked).needs_gpu and not on_gpu:
        raise ValueError(
            f"vllm.sync_backend {asked} needs GPUs, and this run has none: use auto or gloo"
        )
    return asked
