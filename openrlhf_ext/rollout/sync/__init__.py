"""How the policy hands its weights to the rollout engines: one file per transport, see ``base.Transport``.

The names of the transports are those of ``vllm.sync_backend`` in the configuration; each is a module of this folder.
"""

from __future__ import annotations

from importlib import import_module

from openrlhf_ext.rollout.sync.base import Transport


def find_transport(name: str) -> Transport:
    """The transport of this name.

    Args:
        name: a module of this folder, or the dotted path of a module elsewhere, which engine workers can import too.

    Raises:
        ValueError: there is no such transport.
    """
    path = name if "." in name else f"{__name__}.{name}"
    try:
        transport = getattr(import_module(path), "TRANSPORT", None)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        transport = None
    if not isinstance(transport, Transport):
        raise ValueError(f"unknown weight-sync transport {name!r}: there is no module {path} with a TRANSPORT")
    return transport


def choose_transport(asked: str, *, on_gpu: bool, colocated: bool, deterministic: bool = False) -> str:
    """The transport that ``vllm.sync_backend`` stands for on this machine.

    Args:
        asked: "auto" or a transport.
        colocated: whether they share them. (Transports that do not fit are refused with the configuration.)
        deterministic: whether the engines are batch-invariant. Then NCCL in them has other settings than in the policy
            (vllm 0.29.0 model_executor/determinism/batch_invariant.py:988), and ranks of one communicator must agree.

    Raises:
        ValueError: the transport that was asked for cannot work here. Nothing is put in its place silently.
    """
    if asked == "auto":
        return ("cuda_ipc" if colocated else "gloo" if deterministic else "nccl") if on_gpu else "gloo"
    if find_transport(asked).needs_gpu and not on_gpu:
        raise ValueError(f"vllm.sync_backend {asked} needs GPUs, and this run has none: use auto or gloo")
    return asked
