"""Memory on the NUMA node of a GPU, with a made-up sysfs and a stand-in for nvidia-smi."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext.cli import doctor
from openrlhf_ext.megatron.step import host_optimizer, numa

UUID, ADDRESS = "3f0d1e2c-aaaa-bbbb-cccc-0123456789ab", "0000:1b:00.0"
_SMI = f"""#!/usr/bin/env bash
[[ "$*" == *uuid,pci.bus_id* ]] || exit 9
echo "GPU-{UUID}, 00000000:1B:00.0"
echo "GPU-another, 00000000:C3:00.0"
"""


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GPU is on node 1, which has one core that this process may use, and one that it may
    not."""
    core = min(os.sched_getaffinity(0))
    for name, text in {
        f"bus/pci/devices/{ADDRESS}/numa_node": "1\n",
        "bus/pci/devices/0000:c3:00.0/numa_node": "-1\n",
        "devices/system/node/node1/cpulist": f"{core},4000-4001\n",
    }.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(_SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(numa, "SYSFS", tmp_path / "sys")
    return tmp_path / "sys"


def affinities() -> dict[int, frozenset[int]]:
    """Of all threads of this process. One that ends between the list and the question is not among
    them."""
    found = {}
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            found[task] = frozenset(os.sched_getaffinity(task))
    return found


def test_memory_is_touched_on_the_gpus_node_and_the_process_stays_where_it_was(sysfs: Path) -> None:
    core, before, seen = min(os.sched_getaffinity(0)), affinities(), {}

    def work() -> torch.Tensor:
        torch.set_num_threads(2)
        row = torch.zeros(1 << 22)
        seen.update(affinities())
        return row

    threads = torch.get_num_threads()
    row = numa.near_gpu(UUID, work)
    torch.set_num_threads(threads)
    new = {task: cores for task, cores in seen.items() if task not in before}
    assert new and set(new.values()) == {frozenset({core})}, "OpenMP's threads of that one too"
    assert all(cores == before[task] for task, cores in affinities().items() if task in before)
    assert not row.any()


@pytest.mark.parametrize("uuid", ["another", "of no GPU"], ids=["node -1", "unknown"])
def test_where_the_node_is_not_known_the_work_is_done_as_ever(sysfs: Path, uuid: str) -> None:
    assert numa.near_gpu(uuid, lambda: frozenset(os.sched_getaffinity(0))) == frozenset(
        os.sched_getaffinity(0)
    )


def test_a_machine_without_nvidia_smi_has_no_nodes_of_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert numa.gpu_addresses() == {} and doctor._numa_nodes() == "one, or not reported by /sys"


def test_an_nvidia_smi_that_fails_is_told_and_costs_the_place_only(sysfs: Path, caplog) -> None:
    (sysfs.parent / "bin/nvidia-smi").write_text("#!/usr/bin/env bash\nexit 9\n")
    assert numa.near_gpu(UUID, lambda: 7) == 7 and "NUMA nodes of GPUs are not known" in caplog.text


def test_rows_of_adams_states_lie_there(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered, seen = [], []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: registered.append(given) or 0, cudaHostUnregister=int
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID)
    )
    zeros = torch.zeros
    monkeypatch.setattr(
        host_optimizer.torch,
        "zeros",
        lambda *size: seen.append(os.sched_getaffinity(0)) or zeros(*size),
    )
    row = host_optimizer._host_memory(1000, torch.device("cuda", 0), _Owner())
    assert seen == [{min(os.sched_getaffinity(0))}] and registered == [(row.data_ptr(), 4000, 0)]


class _Owner:
    """Something that can be referred to weakly."""


def test_the_doctor_says_it(sysfs: Path) -> None:
    assert doctor._numa_nodes() == f"GPU {ADDRESS} on node 1 (3 cores)"
