"""A real whole bundle, made, unpacked, compiled and imported: `bash tests/run.sh -m whole_bundle`
(half an hour of downloads and compression on two busy cores, five minutes on idle ones).

What links against torch with CUDA, or is compiled for Python 3.12, needs another Python than this
one:
OPENRLHF_EXT_GPU_PYTHON names one that has what the GPU machine has (torch 2.11.0 of the package
index is 2.11.0+cu130), but no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import bundle as bundles
from tests.gpu.bundle import ROOT, read_manifest
from tests.gpu.test_whole import compiled
from tests.gpu.whole import here, make, symbols

pytestmark = [pytest.mark.whole_bundle, pytest.mark.slow]
GPU_PYTHON = os.environ.get("OPENRLHF_EXT_GPU_PYTHON")
needs_gpu_python = pytest.mark.skipif(
    GPU_PYTHON is None,
    reason="OPENRLHF_EXT_GPU_PYTHON names no Python 3.12 with torch 2.11.0+cu130",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "bundle"
    command = ["bash", "tests/gpu/bundle.sh", str(folder), "--whole"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, check=True)
    return folder


@pytest.fixture(scope="module")
def unpacked(made) -> Path:
    """By the Python of the machine, if it is at hand, else by this one: either compiles every
    module."""
    target = made.with_name("unpacked")
    code = """if True:
        import sys; from pathlib import Path
        from tests.gpu.whole import here; from tests.gpu.bundle import read_manifest
        made, target = map(Path, sys.argv[1:])
        here.unpack(made, read_manifest(made), target)
    """
    command = [GPU_PYTHON or sys.executable, "-c", code, str(made), str(target)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return target


def test_it_can_be_carried(made):
    manifest = read_manifest(made)
    assert sum(path.stat().st_size for path in made.iterdir()) <= make.MOST_BYTES
    assert manifest["packages"] == {name: bundles.pinned(name) for name in bundles.WHOLE}
    assert bundles.damage(made, manifest) is None and manifest["heads"] == [64, 128]


def test_everything_is_there_as_its_wheel_says(unpacked):
    assert here.is_unpacked(unpacked.with_name("bundle"), unpacked)
    assert os.access(unpacked / "site/ray/core/src/ray/raylet/raylet", os.X_OK)
    assert (unpacked / "toy/start/model.safetensors").is_file() and (
        unpacked / "toy/data/train.jsonl"
    ).is_file()
    assert all(any((unpacked / "site" / name).glob("__init__.py")) for name in bundles.STAND_INS)


def test_no_extension_lacks_a_symbol_and_each_is_of_torchs_stable_interface(unpacked):
    default = bundles._parse(["--whole"])
    known = symbols.symbols_of_torch(default.python, default.torch, "13.0", default.cache)
    found = {
        path.name: symbols.missing(path, known) for path in (unpacked / "site/vllm").rglob("*.so")
    }
    assert len(found) == 6 and not any(found.values()), found
    # nothing of torch: what the test above looked up
    newest = {"GLIBC_9", "GLIBCXX_9", "CXXABI_9", "GCC_9"}
    (kernels,) = (unpacked / "site/vllm").glob("_C_stable*.so")
    assert "aoti_torch_get_data_ptr" in symbols.missing(kernels, newest)


_PURE = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from vllm import LLM
import xgrammar, openai_harmony, vllm
print(json.dumps([module.__file__ for module in (vllm, xgrammar, openai_harmony)]))
"""
MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.structured_output.backend_xgrammar",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.lora.model_manager",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.sample.sampler",
)
ON_CUDA = (
    "vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.triton_attn", "vllm.device_allocator.cumem",
    "vllm.lora.punica_wrapper.punica_gpu", "vllm.lora.ops.triton_ops", "vllm.model_executor.kernels.linear",
    "vllm.model_executor.layers.quantization.online.fp8", "vllm.model_executor.determinism.batch_invariant",
    "vllm.v1.worker.gpu.warmup", "vllm.v1.worker.gpu.sample.sampler", "vllm.vllm_flash_attn",
    "vllm.v1.executor.multiproc_executor", "vllm.model_executor.model_loader.reload", "vllm.compilation.backends",
    "vllm.model_executor.models.qwen3_moe", "vllm.model_executor.layers.fused_moe.routed_experts_capturer",
)  # fmt: skip


def test_vllms_python_is_imported_with_stand_ins_by_this_python_too(unpacked, tmp_path):
    """Over this environment's packages: what is compiled in site/ is for Python 3.12."""
    for name in ("vllm", *bundles.STAND_INS, "sitecustomize.py"):
        (tmp_path / name).symlink_to(unpacked / "site" / name)
    own = {
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    command = [sys.executable, "-c", _PURE, *MODULES]
    done = subprocess.run(
        command, env=os.environ | own, check=True, stdout=subprocess.PIPE, text=True
    )
    assert all(path.startswith(str(tmp_path)) for path in json.loads(done.stdout.splitlines()[-1]))


# ---- with the machine's torch, without a GPU

_EXTENSIONS = """
import json, sys, torch
for path in sys.argv[1:]:
    torch.ops.load_library(path)
names = torch._C._dispatch_get_all_op_names()
experts = {f"_moe_C::{name}" for name in ("topk_softmax", "moe_align_block_size", "moe_sum")}
fp8 = torch.ops._C.cutlass_scaled_mm_supports_block_fp8(90)
try:
    torch.ops._C.rms_norm(torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(4), 1e-6)
except NotImplementedError:  # an op for CUDA, whose arguments were understood
    kept = [sum(name.startswith("_C::") for name in names), "_vllm_fa3_C::fwd" in names, experts.issubset(names)]
    print(json.dumps([*kept, fp8]))
"""
_NVML_WITH_ONE_H100 = """
import importlib.util, sys, triton.backends
triton.backends.backends["nvidia"].driver.is_active = staticmethod(lambda: True)

class Nvml:  # vLLM chooses its platform as it is imported
    def find_spec(self, name, path=None, target=None):
        if name != "vllm.third_party.pynvml":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(nvml):
            execute(nvml)
            nvml.nvmlInit = nvml.nvmlShutdown = lambda *_: None
            nvml.nvmlDeviceGetCount = lambda: 1
            nvml.nvmlDeviceGetHandleByIndex = lambda index: index
            nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
            nvml.nvmlDeviceGetName = lambda handle: "NVIDIA H100 80GB HBM3"
            nvml.nvmlDeviceGetUUID = lambda handle: "GPU-0"
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Nvml())
from vllm.platforms import current_platform
assert current_platform.is_cuda(), current_platform
current_platform.import_kernels()
"""
_OURS = """
from openrlhf_ext import patches
patches.apply()
import importlib, pkgutil, openrlhf_ext
names = [info.name for info in pkgutil.walk_packages(openrlhf_ext.__path__, "openrlhf_ext.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
_RAY = """
import json, ray
ray.init(address="local", include_dashboard=False, num_cpus=1, object_store_memory=256 << 20,
         runtime_env={"env_vars": {"GIVEN": "1"}}, log_to_driver=False)

@ray.remote
def look():
    import inspect, os, sys
    early = "torch" in sys.modules
    import torch.distributed as dist
    from torch.nn.attention.varlen import varlen_attn
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return os.environ["GIVEN"], early, grouped, dist.Work.exception(None)

print(json.dumps(ray.get(look.remote())))
"""


@pytest.fixture(scope="module")
def libcuda(unpacked, tmp_path_factory) -> Path:
    """A folder with a driver that has all names and no device."""
    names = {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuGetProcAddress"}
    for library in (unpacked / "site/vllm").rglob("*.so"):
        names |= {
            symbol for symbol in symbols._undefined(library) if symbols._ELSEWHERE.match(symbol)
        }
    source = "\n".join(
        f"int {name}() {{ return 100; }}" for name in sorted(names) if not name.startswith("cublas")
    )
    return compiled(tmp_path_factory.mktemp("driver") / "libcuda.so.1", source).parent


def of_the_machine(unpacked: Path, libcuda: Path, code: str, *arguments: str) -> str:
    """The last line that the machine's Python prints."""
    assert GPU_PYTHON is not None
    own = {
        "PYTHONPATH": f"{ROOT}:{unpacked / 'site'}",
        "LD_LIBRARY_PATH": str(libcuda),
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [GPU_PYTHON, "-c", code, *arguments]
    done = subprocess.run(
        command, env=os.environ | own, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.splitlines()[-1]


@needs_gpu_python
def test_extensions_load_in_the_machines_torch(unpacked, libcuda):
    libraries = map(str, (unpacked / "site/vllm").rglob("*.so"))
    assert json.loads(of_the_machine(unpacked, libcuda, _EXTENSIONS, *libraries)) == [
        107,
        True,
        True,
        True,
    ]


@needs_gpu_python
def test_an_engines_modules_are_imported_as_on_an_h100(unpacked, libcuda):
    files = json.loads(
        of_the_machine(unpacked, libcuda, _NVML_WITH_ONE_H100 + _PURE, *MODULES, *ON_CUDA)
    )
    assert all(path.startswith(str(unpacked / "site")) for path in files)


@needs_gpu_python
def test_every_module_of_ours_is_imported(unpacked, libcuda):
    assert int(of_the_machine(unpacked, libcuda, _OURS)) > 200


@needs_gpu_python
def test_slimmed_ray_runs_a_task_in_which_torch_is_changed(unpacked, libcuda):
    assert json.loads(of_the_machine(unpacked, libcuda, _RAY)) == ["1", False, True, None]
