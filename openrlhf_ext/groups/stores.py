"""Stores through which processes connect."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(address: str, timeout: timedelta = timedelta(minutes=5)) -> dist.TCPStore:
    """Opens a store that this process serves only at ``address``, on a port that no other process
    can take first.

    ``init_process_group`` of the same process uses this store because of ``multi_tenant``. Torch by
    default listens on all addresses of the machine, without authentication. ``timeout``: limit of
    each wait for a key.
    """
    address = address.strip("[]")  # IPv6 addresses come in brackets from Ray
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )
    except Exception:
        os.close(descriptor)
        raise
