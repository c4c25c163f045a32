"""Says whether this machine and environment can run openrlhf_ext: `openrlhf-ext doctor [--json]`.

With `--cluster [options of the training command]` it checks every node of the Ray cluster that
RAY_ADDRESS names.

The wanted versions are the extras in setup.py: `gpu` where a CUDA device is present, `cpu`
elsewhere. Exit status 1 if a required package is missing or has another version, if a package that
breaks the stack is present, or if a patch does not apply; 0 otherwise. Imports torch and no other
package of the stack, so it takes a few seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from openrlhf_ext.cli.main import CommandParser, silence_libraries
from openrlhf_ext.inputs import shipped
from openrlhf_ext.outputs import aligned
from openrlhf_ext.patches import PatchStatus, status
from openrlhf_ext.patches.base import installed_version
from openrlhf_ext.patches.environment import (
    has_cuda,
    has_module,
    has_nvidia_apex,
    has_transformer_engine,
)

# ---- a machine with GPUs: driver, cuDNN, compiler, and if TransformerEngine fits torch

OLDEST_CUDNN = (9, 18)
"""Older ones give NaN in the backward pass of packed sequences with context parallelism on Hopper
(TransformerEngine, issue 2186)."""
OLDEST_DRIVER = {13: 580, 12: 525}
"""By CUDA's major version: NVIDIA's table of minor-version compatibility."""
_COMMAND_S = 30.0
_IMPORT_S = 300.0  # of TransformerEngine, from shared storage that has not read it before
_RAY_OF_RDT = (2, 56)


@dataclass(frozen=True)
class GpuHost:
    """What was found.

    Attributes:
        driver: the kernel module's version; None: nvidia-smi did not say.
        cudnn: version that torch has loaded.
        cudnn_libraries: every libcudnn.so that a process may load.
        compiler: path of gcc, which Triton calls at run time.
        python_header: path of Python.h, which Triton compiles against.
        transformer_engine: versions of its distributions that are installed, by name.
        engine_error: why TransformerEngine cannot be imported; None: it can, or it is not
        installed.
        ptrace_scope: Yama's, see `rollout.sync.cuda_ipc`.
        sharded_rdt: what vLLM's sharded weight transfer lacks, which is not used here
        (docs/weight_sync.md).
        numa: nodes of the GPUs, on which states in host memory are kept (ds.adam_offload).
    """

    cuda: str
    driver: str | None
    cudnn: tuple[int, int, int]
    cudnn_libraries: tuple[str, ...]
    compiler: str | None
    python_header: str | None
    transformer_engine: Mapping[str, str]
    engine_error: str | None = None
    ptrace_scope: int = 0
    sharded_rdt: str = ""
    numa: str = "unknown"

    @property
    def rows(self) -> list[tuple[str, str]]:
        libraries = ", ".join(self.cudnn_libraries) or "not found as a file"
        return [
            ("CUDA of torch", self.cuda),
            ("driver", self.driver or "unknown"),
            ("cuDNN", f"{_dotted(self.cudnn)} ({libraries})"),
            ("gcc", self.compiler or "absent"),
            ("Python.h", self.python_header or "absent"),
            ("TransformerEngine", self._engine_parts or "absent"),
            ("ptrace_scope", str(self.ptrace_scope)),
            ("sharded_rdt of vLLM", f"not used; {self.sharded_rdt}"),
            ("NUMA nodes", self.numa),
        ]

    def problems(self) -> Iterator[str]:
        """One sentence for each thing that would crash, lie or crawl."""
        cuda_major = int(self.cuda.split(".")[0])
        oldest = OLDEST_DRIVER.get(cuda_major)
        if self.driver is None:
            yield (
                "nvidia-smi does not report the driver's version: the driver is not installed "
                "correctly"
            )
        elif oldest is not None and int(self.driver.split(".")[0]) < oldest:
            yield (
                f"the driver is {self.driver}, but torch's CUDA {self.cuda} needs {oldest} or newer"
            )
        if self.cudnn[:2] < OLDEST_CUDNN:
            yield (
                f"cuDNN {_dotted(self.cudnn)} is loaded, but {_dotted(OLDEST_CUDNN)} or newer is "
                "needed: older ones give NaN with packed sequences and context parallelism on "
                "Hopper"
            )
        if len(self.cudnn_libraries) > 1:
            yield (
                f"there are {len(self.cudnn_libraries)} cuDNNs ({', '.join(self.cudnn_libraries)}) "
                "and a process may load a different one than torch's: unset CUDNN_HOME, and remove "
                "the other folders from LD_LIBRARY_PATH"
            )
        if self.compiler is None:
            yield "gcc is missing, but Triton compiles a launcher with it on every node: install it"
        if self.python_header is None:
            where = sysconfig.get_path("include")
            yield (
                f"Python.h is missing ({where}), but Triton compiles against it: install "
                "python3-dev"
            )
        if self.ptrace_scope > 1:  # with 1 the policy allows it
            yield (
                f"kernel.yama.ptrace_scope is {self.ptrace_scope}: CUDA IPC, which sends weights "
                "from the policy to engines on the same GPUs (train.colocate_all), is not "
                "permitted; run sysctl kernel.yama.ptrace_scope=1, or use --vllm.sync_backend gloo "
                "there"
            )
        yield from self._engine_problems(cuda_major)

    @property
    def _engine_parts(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.transformer_engine.items())

    def _engine_problems(self, cuda_major: int) -> Iterator[str]:
        found = self.transformer_engine
        cores = [name for name in found if re.fullmatch(r"transformer-engine-cu\d+", name)]
        wanted = f"transformer-engine-cu{cuda_major}"
        if found and cores != [wanted]:
            yield (
                f"TransformerEngine's core must be only {wanted}, because torch's CUDA is "
                f"{self.cuda}: found {', '.join(cores) or 'none'}; uninstall the others (uv "
                "installs cu12 beside cu13, pip does not)"
            )
        if found and "transformer-engine-torch" not in found:
            yield "transformer-engine-torch is missing: TransformerEngine cannot be used without it"
        if len(set(found.values())) > 1:
            yield (
                f"the parts of TransformerEngine must have the same version: {self._engine_parts}"
            )
        if self.engine_error is not None:
            yield (
                f"TransformerEngine cannot be imported ({self.engine_error}), and Megatron would "
                "not report it: its torch extension must be compiled against the torch that is "
                "installed; remove .setup/transformer_engine in the environment and run the setup "
                "again"
            )


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def examine_gpu_host() -> GpuHost:
    """Look at this machine. Imports torch, and has it load cuDNN."""
    import torch

    from openrlhf_ext.rollout.sync.cuda_ipc import ptrace_scope

    cudnn = torch.backends.cudnn.version() or 0
    header = Path(sysconfig.get_path("include")) / "Python.h"
    python_header = str(header) if header.is_file() else None
    names = (
        "transformer-engine",
        "transformer-engine-torch",
        "transformer-engine-cu12",
        "transformer-engine-cu13",
    )
    engine = {name: version for name in names if (version := installed_version(name)) is not None}
    engine_error = _engine_error() if engine else None
    return GpuHost(
        cuda=torch.version.cuda or "0",
        driver=_driver(),
        cudnn=(cudnn // 10000, cudnn // 100 % 100, cudnn % 100),
        cudnn_libraries=tuple(sorted(_cudnn_libraries())),
        compiler=shutil.which("gcc"),
        python_header=python_header,
        transformer_engine=engine,
        engine_error=engine_error,
        ptrace_scope=ptrace_scope(),
        sharded_rdt=_sharded_rdt(installed_version("ray"), installed_version("nixl")),
        numa=_numa_nodes(),
    )


def _numa_nodes() -> str:
    from openrlhf_ext.megatron.step.numa import gpu_addresses, node_of

    said = []
    for address in gpu_addresses().values():
        if (node := node_of(address)) is not None:
            said.append(f"GPU {address} on node {node[0]} ({len(node[1])} cores)")
    return ", ".join(said) or "one, or not reported by /sys"


def _sharded_rdt(ray: str | None, nixl: str | None) -> str:
    """By the installed versions; vllm 0.32.0
    distributed/weight_transfer/sharded_rdt_common.py:50."""
    version = tuple(int(part) for part in re.findall(r"\d+", ray or "")[:2])
    lacking = []
    if version < _RAY_OF_RDT:
        lacking.append(f"it needs ray {_dotted(_RAY_OF_RDT)}, got {ray}")
    if not nixl:
        lacking.append("it needs nixl, which is absent")
    return "; ".join(lacking) or "its packages are there"


def _driver() -> str | None:
    answer = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def _cudnn_libraries() -> set[str]:
    """Torch's own, and those whose libcudnn.so comes before it: for TransformerEngine CUDNN_HOME,
    which a run sets to torch's unless it is set (``megatron.settings.training_environment``), for
    torch LD_LIBRARY_PATH. The system's own, where the loader looks last, is not among them: with
    ``patches/transformer_engine_cudnn.py`` nothing takes it."""
    home = os.environ.get("CUDNN_HOME")
    patterns = [f"{home}/**/libcudnn.so*"] if home else []
    patterns += [
        f"{folder}/libcudnn.so*"
        for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if folder
    ]
    if (spec := find_spec("nvidia")) is not None:
        patterns += [f"{root}/*/lib/libcudnn.so*" for root in spec.submodule_search_locations or ()]

    found = set()
    for pattern in patterns:
        for file in glob.glob(pattern, recursive=True):
            if "stub" not in file:
                found.add(str(Path(file).resolve()))
    return found


def _engine_error() -> str | None:
    """What an import of TransformerEngine says, in a process of its own: it loads libraries for
    good.

    The patches and torch come first, as in a run: alone, it takes nvrtc and curand of a toolkit
    that it finds, and then does not look for cuBLAS and cudart, which torch has loaded in a run
    (TransformerEngine 2.11 common/__init__.py:374).
    """
    program = (
        "from openrlhf_ext import patches; patches.apply(); import torch, "
        "transformer_engine.pytorch"
    )
    command = [sys.executable, "-c", program]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"not finished after {_IMPORT_S:.0f} s"
    if answer.returncode == 0:
        return None
    return (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


# ---- the doctor

DISTRIBUTION = "openrlhf_ext"
MINIMUM_PYTHON = (3, 11)
GIB = 2**30
# apex's: products that add to fp32 gradients in place
_WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"

# name -> why it must be absent where there is no CUDA device
BREAKS_CPU_STACK = {
    "torchvision": "its CUDA build breaks `from vllm import LLM`",
    "torchaudio": "its CUDA build breaks `from vllm import LLM`",
    "torchcodec": "it needs torchvision's libraries",
    "transformer-engine": "it breaks the import of megatron.core",
}


@dataclass(frozen=True)
class PackageCheck:
    name: str
    wanted: str
    installed: str | None
    ok: bool


@dataclass(frozen=True)
class KernelCheck:
    """A source of fused kernels, none of which is needed on a CPU."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """All findings; `problems` has one sentence for each thing that keeps the stack from
    running."""

    machine: dict[str, str]
    extra: str
    packages: list[PackageCheck]
    kernels: list[KernelCheck]
    patches: list[PatchStatus]
    problems: list[str]
    gpu_host: GpuHost | None = None


def main(argv: Sequence[str] | None = None) -> int:
    silence_libraries()
    parser = CommandParser("doctor", __doc__.splitlines()[0], takes_run_options=True)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="check all nodes of the Ray cluster RAY_ADDRESS; options of the training command "
        "(--config FILE ...) define what the run needs there",
    )
    parser.add_argument(
        "--wait_for",
        nargs="+",
        default=[],
        metavar="NODE",
        help="with --cluster: wait for these nodes",
    )
    parser.add_argument(
        "--wait_s", type=float, default=60.0, help="longest wait for nodes (default: %(default)s)"
    )
    arguments, training = parser.parse_known_args(argv)
    if arguments.cluster:
        return examine_cluster(arguments, training)
    if training:
        parser.error(
            f"unrecognized arguments: {' '.join(training)}; options of a run need --cluster"
        )
    report = examine()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print(render(report))
    return 1 if report.problems else 0


def examine_cluster(arguments: argparse.Namespace, training: list[str]) -> int:
    """The same of a cluster, for the run that the options of a training command describe; 2 if
    these are wrong."""
    from openrlhf_ext.cli import doctor_cluster
    from openrlhf_ext.config import ConfigError, load_config

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    # ray.init's tip about accelerators (ray 2.60.0 _private/worker.py:1390)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    if not (address := os.environ.get("RAY_ADDRESS")):
        print("doctor --cluster needs RAY_ADDRESS, such as HEAD:6379", file=sys.stderr)
        return 2
    try:
        config = load_config(training) if training else None
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    extra = "gpu" if has_cuda() else "cpu"
    packages = [name for name, _ in pinned_packages(extra)]
    report = doctor_cluster.examine_cluster(
        address, packages, config, arguments.wait_for, arguments.wait_s
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print(_render_cluster(report.findings, doctor_cluster.table(report)))
    return 1 if report.has_errors else 0


def _render_cluster(findings: Sequence[Any], table: Sequence[tuple[str, ...]]) -> str:
    lines = [
        f"{found.severity}: {found.node}: {found.text}\n    remedy: {found.remedy}"
        for found in findings
    ]
    return "\n".join([_section("Nodes", table), "", *(lines or ["Everything needed is there."])])


def examine() -> Report:
    torch_present = has_module("torch")
    cuda = torch_present and has_cuda()
    extra = "gpu" if cuda else "cpu"
    packages = [check_package(name, wanted) for name, wanted in pinned_packages(extra)]
    statuses = status() if torch_present else []
    gpu_host = examine_gpu_host() if cuda else None
    of_machine = conflict_problems() if gpu_host is None else gpu_host.problems()
    return Report(
        machine=describe_machine(),
        extra=extra,
        packages=packages,
        kernels=check_kernels(cuda),
        patches=statuses,
        problems=[
            *package_problems(packages),
            *of_machine,
            *(status.reason for status in statuses if status.state == "refused"),
        ],
        gpu_host=gpu_host,
    )


# --- checks
# --------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{memory / GIB:.1f} GiB",
        "disk": f"{shutil.disk_usage(Path.cwd()).free / GIB:.1f} GiB free at {Path.cwd()}",
    }


def pinned_packages(extra: str) -> Iterator[tuple[str, str]]:
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    for requirement in requirements:
        match = re.fullmatch(
            r"([\w.-]+)(?:\[[^]]*])?==([^;\s]+)\s*; extra == ['\"](\w+)['\"]", requirement
        )
        if match and match[3] == extra:
            yield match[1], match[2]


def check_package(name: str, wanted: str) -> PackageCheck:
    """Compare versions; the build tag of the installed one ("+cpu") does not count."""
    installed = installed_version(name)
    is_wanted = installed is not None and installed.partition("+")[0] == wanted
    return PackageCheck(name, wanted, installed, is_wanted)


def check_kernels(cuda: bool) -> list[KernelCheck]:
    engine = has_transformer_engine()
    without_apex = "torch's optimizers"
    if has_module("apex"):
        without_apex = (
            "the installed package apex is not NVIDIA's (it has no amp_C); torch's optimizers are "
            "used"
        )
    gradients = "torch adds them"
    if engine:
        gradients = "TransformerEngine's layers add them to main_grad themselves"
    return [
        _kernel("CUDA", cuda, "device visible", "no device: CPU with gloo"),
        _kernel(
            "TransformerEngine",
            engine,
            installed_version("transformer-engine") or "",
            "torch layers, no FP8",
        ),
        _kernel("NVIDIA apex", has_nvidia_apex(), "amp_C", without_apex),
        _kernel(
            "apex weight gradients", has_module(_WEIGHT_GRADIENTS), _WEIGHT_GRADIENTS, gradients
        ),
        _kernel(
            "flash-linear-attention",
            has_module("fla"),
            installed_version("flash-linear-attention") or "",
            "no gated delta nets on GPUs",
        ),
        _kernel(
            "triton",
            has_module("triton"),
            installed_version("triton") or "",
            "torch code for all kernels",
        ),
    ]


def _kernel(name: str, available: bool, present: str, absent: str) -> KernelCheck:
    detail = present if available else absent
    return KernelCheck(name, available, detail)


def package_problems(packages: Sequence[PackageCheck]) -> Iterator[str]:
    if sys.version_info < MINIMUM_PYTHON:
        yield (
            f"Python {_dotted(MINIMUM_PYTHON)} or newer is needed, but this is "
            f"{platform.python_version()}"
        )
    if not packages:
        yield (
            f"{DISTRIBUTION} is not installed with its list of pinned packages: pip install "
            "--no-deps -e ."
        )
    for package in packages:
        if package.installed is None:
            yield f"{package.name} is missing, but {package.wanted} is needed"
        elif not package.ok:
            yield f"{package.name} {package.installed} is installed, but {package.wanted} is needed"


def conflict_problems() -> Iterator[str]:
    for name, reason in BREAKS_CPU_STACK.items():
        if installed_version(name) is not None:
            yield f"{name} is installed and must be removed on a machine without CUDA: {reason}"


# --- tables
# --------------------------------------------------------------------------------------------------


def render(report: Report) -> str:
    heading = ("package", "wanted", "installed", "")
    packages = [
        (p.name, p.wanted, p.installed or "-", "ok" if p.ok else "NOT OK") for p in report.packages
    ]
    kernels = [(k.name, "present" if k.available else "absent", k.detail) for k in report.kernels]
    patches = [(p.name, p.state, p.reason) for p in report.patches]

    sections = [
        _section("Machine", list(report.machine.items())),
        _section(f"Packages (extra {report.extra})", [heading, *packages]),
    ]
    if report.gpu_host is not None:
        sections.append(_section("GPU host", report.gpu_host.rows))
    sections += [
        _section("Fused kernels", kernels),
        _section("Patches", patches),
        _verdict(report),
    ]
    return "\n\n".join(sections)


def _section(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return f"{title}\n  none checked, torch is missing"
    return "\n  ".join([title, *aligned(rows, str.ljust)])


def _verdict(report: Report) -> str:
    if not report.problems:
        return "Everything needed is there."
    script = "bash examples/scripts/setup_env.sh" + ("" if report.extra == "cpu" else " gpu")
    lock = shipped("requirements") / f"{report.extra}.lock"
    by_pip = (
        f"pip install --no-deps --ignore-requires-python -r {lock}, with torch installed separately"
    )
    remedy = by_pip if lock.parent.parent.name == "openrlhf_ext" else script
    return "\n  ".join(["Problems", *report.problems, f"Remedy: {remedy}"])


if __name__ == "__main__":
    sys.exit(main())
