"""Lets megatron-core run on the CPU (gloo) where no CUDA device is present.

Dependency: megatron-core 0.19.2; also mbridge 0.15.1, which the tests use as a cross-check.

Wrong there: CUDA is hard-wired. The places that run in training, checkpointing and resharding with
TP, PP, DP, CP and SP (found by tracing):
  torch.cuda.current_device()  tensor_parallel/layers.py:647, mappings.py:145,185, utils.py:715,
                               pipeline_parallel/p2p_communication.py:211-223,334,342,
                               param_and_grad_buffer.py:1180,1186, rotary_pos_embedding.py:162,
                               distrib_optimizer.py:1362, state_dict_saver.py:252
  device="cuda"                pipeline_parallel/schedules.py:749,1121,2292,
                               optimizer/optimizer.py:698,702,1249,
                               optimizer/clip_grads.py:112,180, utils.py:1332,
                               transformer/utils.py:39
  tensor.cuda()                language_module.py:307, rope_utils.py:62, distrib_optimizer.py:1374
  torch.cuda.current_stream()  param_and_grad_buffer.py:632
  torch.cuda.synchronize()     p2p_communication.py:263, filesystem_async.py:248
  pin_memory=True              rope_utils.py:63
  "torch.cuda.FloatTensor"     optimizer.py:1009, clip_grads.py:174,
                               distrib_optimizer.py:401,466,758
  CUDA random states           tensor_parallel/random.py:107,136,303-308,490
  torch.compile                jit.py:21, which on the CPU starts Inductor and needs a C++ compiler;
                               transformer/moe/router.py:918, which imports Inductor into every rank
                               (2.5 s of a core) for a method of inference
  streams and events           transformer/moe/token_dispatcher.py:469,922-949: sizes on their way
                               to the host
  import of wandb              timers.py:13, which logs nothing in a rank
  import of Triton             transformer/moe/ops/paged_stash.py:4, imported by every schedule,
                               not called on a CPU
Without TransformerEngine transformer/moe/moe_utils.py:1326 reads a name that its failed import left
undefined. And beneath it, in torch 2.13's gloo: coalesced all-gathers in flight, which
overlap.param_gather leads to (param_and_grad_buffer.py:515), corrupt the heap. Two processes that
do nothing else die after 200 to 5,000 rounds of six gathers; gathers that are not coalesced, and
coalesced reductions, did not in 4,000. And gloo gathers and scatters parts of one size only, where
the ranks that share experts (tensor_parallel/mappings.py:152,200) have other numbers of tokens.

Changes: the modules of the two packages are compiled from a syntax tree in which these expressions
name the CPU (the random states become those of torch's CPU generator). Line numbers and the files
stay as they are, and torch itself is not touched. The compiled code is cached per environment. jit
fusion is switched off with Megatron's own switch. The module of Triton's kernels has names without
kernels. Parameters are gathered bucket by bucket, and waited for together as before. Parts of
several sizes are padded to the largest to be gathered, and reduced as a whole before each rank
takes its own. With a CUDA device present the modules are loaded as they are.

Remove when: megatron-core takes the device from one place; the gathers, when coalesced ones of gloo
may be in flight.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from openrlhf_ext.patches.base import Patch, PatchRefused
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.patches.import_hooks import patch_finder
from openrlhf_ext.patches.openrlhf_imports import deferring

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSIONS = ("0.19.2",)
MBRIDGE_VERSIONS = ("0.15.1",)

_ON_CPU = {
    # torch.cuda.<name>(...) -> what stands in its place
    "current_device": 'torch.device("cpu")',
    "current_stream": "None",
    "synchronize": "None",
}
_TRITON_KERNELS = "megatron.core.transformer.moe.ops.paged_stash"
# exist as torch.<name> for the CPU
_GENERATOR_FUNCTIONS = ("get_rng_state", "set_rng_state", "manual_seed")
_TENSOR_TYPES = {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}
_CUDA_DEVICES = ("cuda", "cuda:0")


def _install() -> None:
    if patch_finder.has_loader("megatron.core"):
        return
    if "megatron.core" in sys.modules and not has_cuda():
        raise PatchRefused(
            "megatron.core was imported before openrlhf_ext.patches.apply(): its modules are "
            "already bound to CUDA. Call openrlhf_ext.patches.apply() before the first import "
            "of megatron in every process."
        )
    for package in _PATCHED_PACKAGES:
        patch_finder.load_with(package, _CpuLoader)
    patch_finder.run_around("megatron.core.timers", _without_wandb)


def _need() -> tuple[bool, str]:
    if has_cuda():
        return False, "a CUDA device is present"
    return (
        True,
        "no CUDA device is present, Megatron's device expressions are rewritten for the CPU",
    )


PATCH = Patch(
    name="megatron_cpu",
    dependency="megatron-core",
    versions=VERSIONS,
    problem=(
        'CUDA is hard-wired: torch.cuda.current_device(), device="cuda", .cuda(), CUDA random '
        "states and type names; "
        "for instance pipeline_parallel/schedules.py:749, tensor_parallel/random.py:107, "
        "optimizer/clip_grads.py:112"
    ),
    change=(
        "compiles megatron.core (and mbridge) from a syntax tree that names the CPU; switches "
        "jit fusion off; gathers parameters bucket by bucket, because coalesced gathers in "
        "flight corrupt the heap in torch 2.13's gloo"
    ),
    removal="megatron-core takes the device from one place, and coalesced gathers of gloo may be in "
    "flight",
    install=_install,
    need=_need,
)

_MBRIDGE = Patch(
    name="megatron_cpu",
    dependency="mbridge",
    versions=MBRIDGE_VERSIONS,
    problem="mbridge/core/bridge.py:321 and core/util.py:151,323 name CUDA devices",
    change=PATCH.change,
    removal=PATCH.removal,
    install=_install,
    need=_need,
)
_PATCHED_PACKAGES = {"megatron.core": PATCH, "mbridge": _MBRIDGE}


class _CpuLoader(SourceFileLoader):
    """Loads a module as it is where CUDA is present, and rewritten for the CPU elsewhere."""

    def exec_module(self, module: ModuleType) -> None:
        if not _runs_on_cpu(_package_of(self.name)):
            SourceFileLoader(self.name, self.path).exec_module(module)
            return
        if self.name == _TRITON_KERNELS:
            vars(module).update(
                GLOBAL_BLOCK_SIZE=None, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None
            )
            return
        super().exec_module(module)
        after_import = _AFTER_IMPORT.get(self.name)
        if after_import is not None:
            after_import(module)

    def source_to_code(  # type: ignore[override]  # as importlib calls it: with the source and its path
        self, data: bytes | str, path: str, *, _optimize: int = -1
    ) -> CodeType:
        return compile(
            rewrite_for_cpu(data, path), path, "exec", dont_inherit=True, optimize=_optimize
        )

    # importlib validates, reads and (atomically) writes bytecode through the two methods below.
    # Redirecting its path keeps rewritten bytecode apart from the ordinary one, which other
    # programs of this environment use.

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._redirected(path))

    def set_data(self, path: str, data: Buffer, *, _mode: int = 0o666) -> None:
        super().set_data(self._redirected(path), data, _mode=_mode)

    def _redirected(self, path: str) -> str:
        if not path.endswith(".pyc"):
            return path
        # "random.cpython-311.pyc" -> "cpython-311.pyc"
        _, _, tag_and_suffix = Path(path).name.partition(".")
        return str(bytecode_folder() / f"{self.name}.{tag_and_suffix}")


def _package_of(module_name: str) -> str:
    return "mbridge" if module_name.partition(".")[0] == "mbridge" else "megatron.core"


@functools.cache
def _runs_on_cpu(package: str) -> bool:
    """Whether to rewrite the package; decided once, at its first import."""
    if has_cuda():
        return False
    _PATCHED_PACKAGES[package].require_known_version()
    return True


@contextlib.contextmanager
def _without_wandb(module: ModuleType) -> Iterator[None]:
    """A rank logs nothing there: half a second of a core."""
    if not _runs_on_cpu("megatron.core"):
        yield
        return
    with deferring(PATCH, ("wandb",), module):
        yield


@functools.cache
def bytecode_folder() -> Path:
    """Where rewritten bytecode is kept: in the environment, and apart for each version of this
    file.

    Nothing is cached if the environment is read-only or PYTHONDONTWRITEBYTECODE is set; every
    policy rank then compiles anew, which with this package's own modules takes 2.5 s of a core.
    """
    fingerprint = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return Path(sys.prefix) / ".openrlhf_ext" / f"megatron_cpu-{fingerprint}"


def rewrite_for_cpu(source: bytes | str, path: str = "<megatron>") -> ast.Module:
    """Parse `source` and replace the expressions that name CUDA by such that name the CPU; line
    numbers are kept."""
    return ast.fix_missing_locations(_CudaToCpu().visit(ast.parse(source, path)))


class _CudaToCpu(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = [
            each for each in node.decorator_list if ast.unparse(each) != "torch.compile"
        ]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _torch_cuda_name(node.func)
        if name in _ON_CPU:
            return _expression(_ON_CPU[name], at=node)
        if name in _GENERATOR_FUNCTIONS:
            node.func = _expression(f"torch.{name}", at=node.func)
        elif _is_torch_device(node) and _is_constant(node.args[0], _CUDA_DEVICES):
            node.args = [ast.copy_location(ast.Constant("cpu"), node.args[0])]
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            to_cpu = ast.Attribute(value=node.func.value, attr="cpu", ctx=ast.Load())
            return ast.copy_location(ast.Call(func=to_cpu, args=[], keywords=[]), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg == "device" and _is_constant(node.value, _CUDA_DEVICES):
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
        elif node.arg == "pin_memory" and _is_constant(node.value, (True,)):
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value in _TENSOR_TYPES:
            return ast.copy_location(ast.Constant(_TENSOR_TYPES[node.value]), node)
        return node


def _torch_cuda_name(node: ast.AST) -> str | None:
    """`<name>` if the expression is `torch.cuda.<name>`, else None."""
    match node:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="cuda"), attr=name):
            return name
    return None


def _is_torch_device(node: ast.Call) -> bool:
    """Whether the call is `torch.device(<something>, ...)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="device"), args=[_, *_]):
            return True
    return False


def _is_constant(node: ast.AST, values: tuple[object, ...]) -> bool:
    return isinstance(node, ast.Constant) and node.value in values


def _expression(source: str, at: ast.AST) -> ast.expr:
    expression = ast.parse(source, mode="eval").body
    for node in ast.walk(expression):
        ast.copy_location(node, at)
    return expression


def _use_cpu_generator(module: ModuleType) -> None:
    """tensor_parallel.random: its named random states are states of torch's CPU generator."""
    import torch

    def get_state(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(new_state)

    vars(module).update(_get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)
    logging.getLogger(module.__name__).addFilter(_is_not_cpu_state_warning)


def _is_not_cpu_state_warning(record: logging.LogRecord) -> bool:
    # fork() warns when the CPU's state changes inside a fork of the GPU's. Here the two are one.
    return record.msg != "CPU RNG state changed within GPU RNG context"


def _switch_off_jit_fusion(module: ModuleType) -> None:
    module.disable_jit_fuser()


def _without_transformer_engine(module: ModuleType) -> None:
    """transformer.moe.moe_utils."""
    vars(module).setdefault("te_general_gemm", None)


def _sizes_are_here(module: ModuleType) -> None:
    """transformer.moe.token_dispatcher: the sizes of what is exchanged are on the host already."""
    dispatcher = module.MoEAlltoAllTokenDispatcher

    def to_lists(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        for name in ("input_splits", "output_splits"):
            sizes = getattr(self, name)
            setattr(self, name, sizes.tolist() if hasattr(sizes, "tolist") else sizes)
        return tokens_per_expert

    dispatcher.cuda_dtoh_stream = "none on the CPU"
    dispatcher._maybe_dtoh_and_synchronize = to_lists


def _exchange_unequal_parts(module: ModuleType) -> None:
    """tensor_parallel.mappings."""
    import torch

    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_any(
        part: torch.Tensor,
        group: Any,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        parts = gather(padded, group).chunk(group.size()) if longest else [part] * group.size()
        return torch.cat(
            [each[:size] for each, size in zip(parts, output_split_sizes, strict=True)]
        )

    def scatter_any(
        whole: torch.Tensor,
        group: Any,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(whole, group, None, use_global_buffer)
        total = whole.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    vars(module).update(
        _gather_along_first_dim=gather_any, _reduce_scatter_along_first_dim=scatter_any
    )


def _gather_bucket_by_bucket(module: ModuleType) -> None:
    """distributed.param_and_grad_buffer: all-gathers pass by torch's coalescing manager, which then
    waits for them."""
    import torch

    coalesce, begun = module._coalescing_manager, []

    def all_gather(
        output: torch.Tensor, part: torch.Tensor, group: torch.distributed.ProcessGroup, **_: object
    ) -> None:  # Megatron tells it async_op; who waits is decided below
        begun.append(group._allgather_base(output, part))

    @contextlib.contextmanager
    def coalesce_reductions(
        group: torch.distributed.ProcessGroup, async_ops: bool
    ) -> Iterator[object]:
        with coalesce(group, async_ops=async_ops) as manager:
            yield manager
        while begun:
            manager.append(begun.pop(0))
        if not async_ops:
            manager.wait()

    vars(module).update(dist_all_gather_func=all_gather, _coalescing_manager=coalesce_reductions)


_AFTER_IMPORT = {
    "megatron.core.distributed.param_and_grad_buffer": _gather_bucket_by_bucket,
    "megatron.core.tensor_parallel.mappings": _exchange_unequal_parts,
    "megatron.core.tensor_parallel.random": _use_cpu_generator,
    "megatron.core.transformer.moe.moe_utils": _without_transformer_engine,
    "megatron.core.transformer.moe.token_dispatcher": _sizes_are_here,
    "megatron.core.jit": _switch_off_jit_fusion,
}
