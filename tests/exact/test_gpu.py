"""Exact mode's operations for GPUs with stand-ins for vLLM's CUDA kernels: which functions are
called, with arguments that the real ones take, on which shapes. Bits are for call 6 of tests/gpu.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from openrlhf_ext.exact import LEAST_QUERIES, NotExact, engine, gpu
from openrlhf_ext.exact.gpu import PAGE, GpuOperations, fill_pages
from openrlhf_ext.exact.operations import rotary_table
from openrlhf_ext.megatron.layers.exact import ExactHead
from openrlhf_ext.rollout.launch import engine_env

vllm = pytest.importorskip("vllm")
EPS = 1e-6
NCCL = "NCCL_MAX_NCHANNELS"


class StandIns:
    """Functions in the place of vLLM's, which record the arguments that the real ones would get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.calls = monkeypatch, {}

    def put(self, module: Any, name: str, compute: Callable, real: Callable | None = None) -> None:
        signature = inspect.signature(real or getattr(module, name))

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            self.calls.setdefault(name, []).append(bound.arguments)
            return compute(*args, **kwargs)

        self.patch.setattr(module, name, stand_in, raising=False)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """A Hopper GPU and vLLM's CUDA build."""
    from vllm import _custom_ops
    from vllm.model_executor.determinism import batch_invariant
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    made = StandIns(monkeypatch)
    made.put(batch_invariant, "init_batch_invariance", lambda: None)
    made.put(batch_invariant, "linear_batch_invariant", F.linear)
    made.put(batch_invariant, "rms_norm_batch_invariant", rms_norm)
    made.put(_custom_ops, "fused_add_rms_norm", fused_add_rms_norm)
    made.put(_custom_ops, "rotary_embedding", rotate_in_place)
    made.put(gumbel, "apply_temperature", lambda x, which, t: x.div_(t[which.long(), None]))
    made.put(logprob, "compute_token_logprobs", lambda x, ids: x.log_softmax(-1).gather(1, ids))
    made.put(fa_utils, "get_flash_attn_version", lambda **_: 3)
    made.put(fa_utils, "flash_attn_varlen_func", flash_attention, vllms_flash_attention())
    monkeypatch.setattr(torch.ops._C, "silu_and_mul", silu_and_mul, raising=False)
    return made


def vllms_flash_attention() -> Callable:
    """Read from its file, because its package cannot be imported without its kernels."""
    file = Path(vllm.__file__).parent / "vllm_flash_attn/flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("flash_attn_interface", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flash_attn_varlen_func


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), eps).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    residual += x
    x.copy_(rms_norm(residual, weight, eps))


def rotate_in_place(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any
) -> None:
    query += positions[:, None]
    key -= positions[:, None]


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    assert x.is_contiguous() and out.is_contiguous()
    one, two = x.chunk(2, -1)
    out.copy_(F.silu(one) * two)


def flash_attention(**given: Any) -> torch.Tensor:
    """From the pages, sequence by sequence, in fp64."""
    starts, out = given["cu_seqlens_q"].tolist(), given["out"]
    for row, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        count = int(given["seqused_k"][row])
        assert count == end - first <= given["max_seqlen_k"]
        pages = given["block_table"][row].long()
        keys, values = (given[name][pages].flatten(0, 1)[:count] for name in "kv")
        found = causal(given["q"][first:end], keys, values, given["softmax_scale"])
        out[first:end] = found
    return out


def causal(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    heads = [x.double().transpose(0, 1) for x in (query, keys, values)]
    found = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
    return found.transpose(0, 1).to(query.dtype)


# ---- operations


def test_linear_layers_are_vllms_products_with_the_weight_itself(stand_ins: StandIns) -> None:
    weight, bias, x = torch.randn(5, 4).bfloat16(), torch.randn(5).bfloat16(), torch.randn(3, 4)
    product = GpuOperations().product(torch.nn.Parameter(weight))
    assert torch.equal(product(x.bfloat16(), bias), F.linear(x.bfloat16(), weight, bias))
    product(x.bfloat16(), None)
    with_bias, without = stand_ins.calls["linear_batch_invariant"]
    assert with_bias["weight"].data_ptr() == weight.data_ptr()
    assert not with_bias["weight"].requires_grad
    assert (with_bias["bias"] is bias, without["bias"]) == (True, None)


@pytest.mark.parametrize("vocabulary", [6, 64])
def test_logits_of_bf16_are_summed_and_given_in_fp32(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, vocabulary: int
) -> None:
    seen: list[torch.Tensor] = []

    def mm(x: torch.Tensor, weight: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        seen.append(weight)
        assert out_dtype == torch.float32
        return x.float() @ weight.float()  # torch has no such product on CPUs

    monkeypatch.setattr(torch, "mm", mm)
    weight, x = torch.randn(vocabulary, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    table = GpuOperations()
    head = table.head_product(torch.nn.Parameter(weight))
    found = ExactHead(table, head).logits(x)
    assert found.shape == (3, vocabulary) and found.stride() == (64, 1)
    torch.testing.assert_close(found, x.float() @ weight.float().t())
    assert seen[0].shape == (4, 64) and not seen[0].requires_grad
    assert (seen[0].data_ptr() == weight.data_ptr()) == (vocabulary == 64), "no copy if none needed"
    assert "linear_batch_invariant" not in stand_ins.calls
    with pytest.raises(NotExact, match="an output layer with a bias is not supported"):
        head(x, torch.zeros(vocabulary))
    table.logits(x.float(), table.head_product(weight.float()))
    assert len(stand_ins.calls["linear_batch_invariant"]) == 1


@pytest.mark.parametrize("of_sum", [False, True])
def test_a_norm_is_vllms_kernel_with_the_gradient_of_the_formula(
    stand_ins: StandIns, of_sum: bool
) -> None:
    x, weight = torch.randn(3, 1, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    before, upstream = x.detach().clone(), torch.randn(3, 1, 8)
    found = GpuOperations().norm(x, weight, EPS, of_sum=of_sum)
    kernel = "fused_add_rms_norm" if of_sum else "rms_norm_batch_invariant"
    (call,) = stand_ins.calls[kernel]
    assert call["epsilon" if of_sum else "eps"] == EPS and call["weight"].shape == (8,)
    if of_sum:  # what was zero is the sum now
        assert torch.equal(call["residual"], before.view(3, 8))
    assert torch.equal(x.detach(), before) and found.shape == x.shape
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    reference = F.rms_norm(exact[0], (8,), exact[1], EPS)
    torch.testing.assert_close(found.double(), reference)
    grads = torch.autograd.grad(found, (x, weight), upstream)
    references = torch.autograd.grad(reference, exact, upstream.double())
    for grad, expected in zip(grads, references, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_activation_is_vllms_kernel_with_the_gradient_of_the_formula(
    stand_ins: StandIns,
) -> None:
    x = torch.randn(3, 1, 10)[..., :8].requires_grad_()  # rows with a gap between them
    upstream = torch.randn(3, 1, 4)
    found = GpuOperations().silu_times(x)
    exact = x.detach().double().requires_grad_()
    reference = F.silu(exact[..., :4]) * exact[..., 4:]
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(found, x, upstream)
    (expected,) = torch.autograd.grad(reference, exact, upstream.double())
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_sum_is_rounded_once_and_differentiable(stand_ins: StandIns) -> None:
    residual, branch = (torch.randn(9).bfloat16().requires_grad_() for _ in range(2))
    table = GpuOperations()
    found = table.add(residual, branch)
    assert table.stream is None and found.dtype == torch.bfloat16
    assert torch.equal(found, (residual.float() + branch.float()).bfloat16())
    for grad in torch.autograd.grad(found.sum(), (residual, branch)):
        assert torch.equal(grad, torch.ones_like(grad))


def test_queries_and_keys_are_rotated_in_copies(stand_ins: StandIns) -> None:
    query, key = torch.randn(3, 2, 4), torch.randn(3, 1, 4)
    positions, table = torch.tensor([0, 1, 7]), torch.randn(8, 4)
    found = GpuOperations().rotate(positions, query, key, table)
    assert torch.equal(found[0], query + positions[:, None, None])
    assert torch.equal(found[1], key - positions[:, None, None])
    (call,) = stand_ins.calls["rotary_embedding"]
    assert call["query"].shape == (3, 8) and call["key"].shape == (3, 4)
    assert (call["head_size"], call["is_neox"]) == (4, True) and call["cos_sin_cache"] is table


def test_attention_is_an_engines_call_over_pages(stand_ins: StandIns) -> None:
    lengths = [40, 1, 16, 3]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    query, key, value = (torch.randn(60, heads, 8).bfloat16() for heads in (4, 2, 2))
    table = GpuOperations()
    found = table.attention(query, key, value, starts, 0.3)
    parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    assert torch.equal(found, torch.cat([causal(*part, 0.3) for part in parts]))
    (call,) = stand_ins.calls["flash_attn_varlen_func"]
    fixed = {
        "causal": True,
        "alibi_slopes": None,
        "window_size": [-1, -1],
        "softcap": 0,
        "scheduler_metadata": None,
        "fa_version": 3,
        "num_splits": 1,
        "max_seqlen_q": LEAST_QUERIES,
    }
    assert {name: call[name] for name in fixed} == fixed
    assert "cu_seqlens_k" not in call and call["k"].shape[1:] == (PAGE, 2, 8)
    assert {call[name].dtype for name in ("block_table", "seqused_k", "cu_seqlens_q")} == {
        torch.int32
    }
    table.attention(query.repeat(5, 1, 1), key.repeat(5, 1, 1), value.repeat(5, 1, 1), *ALL_OF_300)
    assert stand_ins.calls["flash_attn_varlen_func"][1]["max_seqlen_q"] == 300
    assert len(stand_ins.calls["get_flash_attn_version"]) == 1  # of a head size, which logs


ALL_OF_300 = (torch.tensor([0, 300], dtype=torch.int32), 0.3)


@pytest.mark.parametrize("lengths", [[1], [16], [17, 1, 1], [15, 16, 17, 33], [1] * 40, [64, 31]])
def test_every_token_has_a_place_of_its_own_in_its_sequences_pages(lengths: list[int]) -> None:
    starts, tokens = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
    each = torch.arange(1, tokens + 1).float().view(tokens, 1, 1)
    keys, values, table = fill_pages(each, -each, starts)
    assert table.dtype == torch.int32 and 0 <= int(table.min()) <= int(table.max()) < len(keys)
    assert torch.equal(values, -keys) and int((keys != 0).sum()) == tokens
    for row, part in enumerate(each.split(lengths)):
        assert torch.equal(keys[table[row].long()].flatten(0, 1)[: len(part)], part)


@pytest.mark.parametrize(("temperature", "stride"), [(1.0, 64), (0.7, 37)])
def test_log_probs_come_from_rows_laid_out_as_an_engines(
    stand_ins: StandIns, temperature: float, stride: int
) -> None:
    """Of a vocabulary of 37, which an engine pads to 64."""
    logits = torch.randn(5, 40)[:, :37]
    before, table = logits.clone(), GpuOperations()
    head = ExactHead(table, table.head_product(torch.zeros(37, 4)))
    found = head.logprobs(logits, temperature)
    assert torch.equal(logits, before)
    torch.testing.assert_close(found, (before / temperature).log_softmax(-1))
    (call,) = stand_ins.calls["compute_token_logprobs"]
    assert call["logits"].stride() == (stride, 1)
    assert call["token_ids"].stride(0) == 0, "no ids of rows x vocabulary in memory"
    assert ("apply_temperature" in stand_ins.calls) == (temperature != 1.0)


def test_rows_that_are_as_an_engines_are_not_copied(stand_ins: StandIns) -> None:
    logits = torch.randn(5, 48)
    GpuOperations().logprobs(logits, 1.0)
    assert stand_ins.calls["compute_token_logprobs"][0]["logits"] is logits


# ---- the process


def test_the_mode_begins_before_anything_is_computed_and_leaves_nccl_alone(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.determinism import batch_invariant

    monkeypatch.setenv(NCCL, "8")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    changed = {NCCL: "1", "NCCL_PROTO": "Simple", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    monkeypatch.setattr(
        batch_invariant, "init_batch_invariance", lambda: os.environ.update(changed)
    )
    GpuOperations()
    assert os.environ[NCCL] == "8" and "NCCL_PROTO" not in os.environ
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_the_mode_begins_with_what_it_sets_for_cublas() -> None:
    from vllm.model_executor.determinism import batch_invariant

    given = gpu._INVARIANT
    mode = inspect.getsource(batch_invariant.enable_batch_invariant_mode)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        assert f'os.environ["{name}"] = "{given[name]}"' in mode


REFUSED = {
    "is not installed": lambda patch: patch.setattr(
        gpu, "vllm_problem", lambda: "vLLM is not installed"
    ),
    "built for cpu, not for CUDA": lambda patch: patch.setattr(
        sys.modules["vllm.platforms"].current_platform, "is_cuda", lambda: False
    ),
    "a GPU has compute capability 8.9: exact mode needs 9.0": lambda patch: patch.setattr(
        torch.cuda, "get_device_capability", lambda: (8, 9)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_process_that_cannot_be_exact_says_why(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    REFUSED[reason](monkeypatch)
    with pytest.raises(NotExact, match=reason.replace(".", r"\.")):
        GpuOperations()
    assert "init_batch_invariance" not in stand_ins.calls


def test_attention_refuses_fp32_and_a_gpu_without_flash_attention(
    stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends import fa_utils

    query, table = torch.randn(300, 2, 8), GpuOperations()
    with pytest.raises(NotExact, match=r"torch.float32: .* takes megatron.param_dtype bf16"):
        table.attention(query, query, query, *ALL_OF_300)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: None)
    with pytest.raises(NotExact, match="no flash attention for this GPU"):
        table.attention(*[query.bfloat16()] * 3, *ALL_OF_300)


# ---- the engine


@pytest.fixture
def gpu_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's two classes, which are as they were afterwards."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    def build(_: Any, queries: int) -> SimpleNamespace:
        return SimpleNamespace(max_query_len=queries)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    compute = RotaryEmbeddingBase._compute_cos_sin_cache
    monkeypatch.setattr(RotaryEmbeddingBase, "_compute_cos_sin_cache", compute)
    yield FlashAttentionMetadataBuilder, RotaryEmbeddingBase


def test_an_engine_attends_to_generated_tokens_as_in_prompts_and_has_the_policys_table(
    gpu_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, rotary = gpu_engine
    environment = engine_env(use_gpu=True, model_path="", exact=True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    engine.install()
    assert [builder.build(None, queries).max_query_len for queries in (1, 127, 500)] == [
        LEAST_QUERIES,
        LEAST_QUERIES,
        500,
    ]
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8)
    devices = []

    def of_base(_: float) -> torch.Tensor:
        devices.append(torch.get_default_device().type)
        return frequencies

    embedding = SimpleNamespace(base=1e4, max_position_embeddings=9, _compute_inv_freq=of_base)
    table = rotary._compute_cos_sin_cache(embedding)
    assert torch.equal(table, rotary_table(frequencies, 9, torch.float32))
    with torch.device("meta"):  # in the place of a GPU
        assert rotary._compute_cos_sin_cache(embedding).device.type == "meta"
    assert devices == ["cpu", "cpu"]


def test_an_engine_on_a_gpu_names_every_variable_that_it_lacks(
    gpu_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, _ = gpu_engine
    for name in engine_env(use_gpu=True, model_path="", exact=True):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    expected = r"needs VLLM_USE_V2_MODEL_RUNNER=1 \(.*\), VLLM_USE_BREAKABLE_CUDAGRAPH=1 \(.*\)"
    with pytest.raises(NotExact, match=expected):
        engine.install()
    assert builder.build(None, 1).max_query_len == 1
