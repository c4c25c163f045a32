"""Which transport a run gets."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from openrlhf_ext.options.sections.rollout import Vllm
from openrlhf_ext.rollout import sync
from openrlhf_ext.rollout.sync import choose_transport, find_transport
from openrlhf_ext.rollout.sync.base import Transport


def test_the_option_names_the_transports() -> None:
    """The choices of `vllm.sync_backend` are the list of transports; each is a module of the
    folder."""
    choices = set(get_args(Vllm.model_fields["sync_backend"].annotation)) - {"auto"}
    modules = {path.stem for path in Path(sync.__file__).parent.glob("[a-z]*.py")}
    with_transport = {
        name for name in modules if hasattr(import_module(f"{sync.__name__}.{name}"), "TRANSPORT")
    }
    assert choices == with_transport == {"gloo", "nccl", "cuda_ipc"}
    assert all(isinstance(find_transport(name), Transport) for name in choices)


@pytest.mark.parametrize("name", ["mpi", "plan", "tests.rollout.mpi", "tests.rollout.updates"])
def test_what_is_no_transport_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown weight-sync transport '{name}'"):
        find_transport(name)


@pytest.mark.parametrize(
    ("on_gpu", "colocated", "transport"),
    [
        (False, False, "gloo"),
        (False, True, "gloo"),
        (True, False, "nccl"),
        (True, True, "cuda_ipc"),
    ],
)
def test_auto_is_the_fastest_that_works(on_gpu: bool, colocated: bool, transport: str) -> None:
    assert choose_transport("auto", on_gpu=on_gpu, colocated=colocated) == transport
    assert choose_transport(transport, on_gpu=on_gpu, colocated=colocated) == transport
    assert choose_transport("gloo", on_gpu=on_gpu, colocated=colocated) == "gloo"


@pytest.mark.parametrize(
    ("on_gpu", "colocated", "transport"), [(True, False, "gloo"), (True, True, "cuda_ipc")]
)
def test_engines_with_other_settings_of_nccl_are_in_no_group_with_the_policy(
    on_gpu: bool, colocated: bool, transport: str
) -> None:
    assert (
        choose_transport("auto", on_gpu=on_gpu, colocated=colocated, deterministic=True)
        == transport
    )


@pytest.mark.parametrize("asked", ["nccl", "cuda_ipc"])
def test_what_cannot_work_is_refused_and_not_replaced(asked: str) -> None:
    with pytest.raises(ValueError, match=f"{asked} needs GPUs(.|\n)*gloo"):
        choose_transport(asked, on_gpu=False, colocated=True)
