"""FP8 in real vLLM engines on CPU: what they hold and compute through reloads, and the proof that
it is FP8."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.kernels.linear import (
    CPUFp8BlockScaledMMKernel,
    CutlassFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    MarlinFP8ScaledMMLinearKernel,
    TritonFp8BlockScaledMMKernel,
)
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineLinearMethod

from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout import launch, quantized
from openrlhf_ext.rollout.probe import WeightSyncMismatch, check_sync
from openrlhf_ext.rollout.response import EngineStartError, NotFP8
from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.sender import WeightSender
from tests.patience import PATIENCE_S
from tests.rollout import fp8_model, spoiling, tiny
from tests.rollout.forking import fork_workers
from tests.rollout.updates import fill_with, plan_of

PROBE = random.Random(0).choices(range(fp8_model.VOCAB), k=148)
TOLERANCE = RunConfig(fp8={"rollout_enable": True}).probe_tolerance


class Rig:
    """An engine, a sender, and the seed of the model whose weights were sent last."""

    def __init__(
        self, engine: Any, workers: int, bf16_layers: list[int], dtype: torch.dtype
    ) -> None:
        self.engine, self.workers, self.bf16_layers, self.dtype = (
            engine,
            workers,
            bf16_layers,
            dtype,
        )
        self.seed = self.version = 0
        plan = plan_of(self.weights(), 200_000)
        staging = find_transport("gloo").staging(plan, [[0]], PATIENCE_S)
        self.sender = WeightSender("gloo", plan, staging, [engine], workers, PATIENCE_S)
        self.sender.connect()

    def model(self) -> Any:
        return fp8_model.random_model(self.seed).to(self.dtype)

    def weights(self) -> dict[str, Tensor]:
        return self.model().state_dict()

    def send(self, seed: int) -> None:
        self.seed, self.version = seed, self.version + 1
        if not self.sender.connected:  # after an update that failed
            self.sender.connect()
        self.sender.send(fill_with(self.weights()), self.version)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        return ray.get(self.engine.call_workers.remote(method, *args), timeout=PATIENCE_S)

    def holds_the_codes(self) -> bool:
        expected = fp8_model.codes(self.model(), self.workers, self.bf16_layers)
        return self.call_workers("fp8_digests") == expected

    def logprobs(self) -> list[float]:
        return ray.get(self.engine.probe_logprobs.remote(PROBE), timeout=PATIENCE_S)

    def difference(self, model: Any) -> float:
        """Mean over the probe, to a model of transformers."""
        return float((torch.tensor(self.logprobs()) - tiny.logprobs(model, PROBE)).abs().mean())

    def check(self, policy: Any) -> float:
        return check_sync(tiny.logprobs(policy, PROBE), [self.logprobs()], TOLERANCE, self.version)


@pytest.fixture(scope="module")
def rigs(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Started together to save time; 'none' cannot start."""
    folder = tmp_path_factory.mktemp("fp8")
    tiny.save_checkpoint(folder, tied=False)
    fp8_model.random_model(0).save_pretrained(folder)
    asked = {"two": (2, [2], "float32"), "bf16": (1, [0], "bfloat16")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RolloutEngine", fp8_model.TellingEngine)
        fork_workers(patch)
        started = {
            name: launch.create_rollout_engines(
                str(folder),
                Vllm(
                    tensor_parallel_size=workers,
                    dtype={"bfloat16": "bf16", "float32": "fp32"}[dtype],
                    enable_prefix_caching=True,
                    kv_cache_mib=32,
                    max_requests=16,
                ),
                max_model_len=256,
                seed=3,
                request_timeout_s=PATIENCE_S,
                use_gpu=False,
                executor_factory=partial(tiny.CountingExecutor, 0.0),
                bf16_layers=bf16_layers,
            )[0]
            for name, (workers, bf16_layers, dtype) in {
                **asked,
                "none": (1, [0, 1, 2], "float32"),
            }.items()
        }
    launch.wait_until_ready([started[name] for name in asked], PATIENCE_S)
    found = {
        name: Rig(started[name], workers, bf16_layers, getattr(torch, dtype))
        for name, (workers, bf16_layers, dtype) in asked.items()
    }
    yield {**found, "none": started["none"]}
    for engine in started.values():
        ray.kill(engine)


@pytest.mark.e2e
@pytest.mark.slow
def test_an_engine_without_a_layer_in_fp8_does_not_start(rigs: dict[str, Any]) -> None:
    with pytest.raises(
        EngineStartError, match="vLLM did not start: NotFP8: (.|\n)*no linear layer is to be FP8"
    ):
        launch.wait_until_ready([rigs["none"]], PATIENCE_S)


@pytest.mark.e2e
@pytest.mark.slow
def test_the_same_quantizer_gives_the_engines_logprobs_through_three_reloads(
    rigs: dict[str, Any],
) -> None:
    """With two workers; ``tests/e2e/test_fp8.py`` compares log-probs of an engine of one worker."""
    rig = rigs["two"]
    for seed in (0, 1, 2, 3):
        if seed:
            rig.send(seed)
        assert rig.holds_the_codes(), seed
        same = rig.difference(fp8_model.emulate(rig.model(), rig.workers, rig.bf16_layers))
        none = rig.difference(rig.model())
        # 4e-7 to 1.7e-2 in ten measurements, for 1e-7 of another order of summation flips a
        # rounding; none: 0.1
        assert same < none / 3 and none > 0.05, (seed, same, none)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_bf16_engine_quantizes_the_weights_that_it_was_sent_through_three_reloads(
    rigs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rig = rigs["bf16"]
    for seed in (1, 2, 3):
        rig.call_workers("lose_weights")  # as an engine does that sleeps before an update
        with caplog.at_level(logging.INFO):
            rig.send(seed)
        assert rig.holds_the_codes()
    count = len(rig.weights())
    assert (
        f"checksums of {count} tensors agree as the engines hold them, of 0 as the engines received"
        in caplog.text
    )


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "bf16"])
def test_a_layer_that_stays_behind_is_named(name: str, rigs: dict[str, Any]) -> None:
    rig = rigs[name]
    rig.send(4)
    rig.call_workers("spoil", "stale layer")
    with pytest.raises(WeightSyncMismatch, match=rf"engine 0: \d+ of \d+: {spoiling.LAYER}"):
        rig.send(5)
    rig.call_workers("spoil", "")
    rig.send(5)
    assert rig.holds_the_codes()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_layer_that_stays_behind_fails_the_probe(rigs: dict[str, Any]) -> None:
    rig = rigs["two"]
    rig.send(4)
    unquantized = rig.check(rig.model())
    same = rig.check(fp8_model.emulate(rig.model(), rig.workers, rig.bf16_layers))
    assert same < unquantized < TOLERANCE / 3, "trained models need more"
    rig.call_workers("spoil", "stale layer")
    with pytest.raises(WeightSyncMismatch):
        rig.send(5)
    rig.call_workers("spoil", "")
    for policy in (rig.model(), fp8_model.emulate(rig.model(), rig.workers, rig.bf16_layers)):
        with pytest.raises(WeightSyncMismatch, match="do not sample from the policy's weights"):
            rig.check(policy)
    rig.send(5)
    rig.check(rig.model())


@pytest.mark.e2e
@pytest.mark.slow
def test_every_update_ends_with_the_proof(rigs: dict[str, Any]) -> None:
    rig = rigs["bf16"]
    wrong = (
        r"model.layers.1.self_attn.qkv_proj: EmulatedLinear quantizes it, although it is to stay "
        r"in BF16"
    )
    with pytest.raises(NotFP8, match=wrong):
        rig.call_workers("prove_quantized", [0, 1])
    with pytest.raises(Exception, match=wrong):
        rig.send(6)


# ---- the proof, on modules that no CPU has


def linear(kernel: Any, scales: Tensor | None = None, method: Any = None) -> nn.Module:
    module = ReplicatedLinear.__new__(ReplicatedLinear)
    nn.Module.__init__(module)
    if method is None:
        method = object.__new__(Fp8PerBlockOnlineLinearMethod)
        method.fp8_linear = object.__new__(kernel)
    module.quant_method = method
    module.weight = nn.Parameter(torch.zeros(200, 130).to(quantized.E4M3), requires_grad=False)
    module.weight_scale_inv = torch.ones(2, 2) if scales is None else scales
    return module


def prove(module: nn.Module, bf16_layers: tuple[int, ...] = ()) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"o_proj": module})])
    quantized.require_fp8(model, bf16_layers)


@pytest.mark.parametrize(
    "kernel",
    [
        CutlassFp8BlockScaledMMKernel,
        DeepGemmFp8BlockScaledMMKernel,
        TritonFp8BlockScaledMMKernel,
        FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    ],
)
def test_kernels_that_quantize_activations_are_taken(kernel: type) -> None:
    prove(linear(kernel))


@pytest.mark.parametrize("kernel", [MarlinFP8ScaledMMLinearKernel, CPUFp8BlockScaledMMKernel])
def test_kernels_that_leave_activations_in_bf16_are_refused(kernel: type) -> None:
    with pytest.raises(
        NotFP8, match=f"layers.0.o_proj: kernel {kernel.__name__} leaves activations in BF16; take"
    ):
        prove(linear(kernel))


def test_other_layers_and_scales_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, plain = DeepGemmFp8BlockScaledMMKernel, object.__new__(UnquantizedLinearMethod)
    with pytest.raises(
        NotFP8,
        match=r"has .*\(200, 130\) with scales of torch.float32 \(2, 1\), should .* \(2, 2\)",
    ):
        prove(linear(kernel, torch.ones(2, 1)))
    with pytest.raises(NotFP8, match="scales of torch.int32"):
        prove(linear(kernel, torch.ones(2, 2).int()))
    with pytest.raises(NotFP8, match="UnquantizedLinearMethod computes it, which is not FP8"):
        prove(linear(kernel, method=plain))
    with pytest.raises(NotFP8, match="quantizes it, although it is to stay in BF16"):
        prove(linear(kernel), bf16_layers=(0,))
    monkeypatch.setattr(quantized, "is_deep_gemm_e8m0_used", lambda: True)
    with pytest.raises(NotFP8, match="VLLM_USE_DEEP_GEMM_E8M0=0"):
        prove(linear(kernel))


def test_layers_in_bf16_are_named_to_vllm_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    args = quantized.with_quantized_layers({"model": "m"}, [1, 27])
    assert args["quantization"] == "fp8_per_block"
    ignore = resolve_quantization_config(args["quantization"], args["quantization_config"]).ignore
    names = {
        n: [f"model.layers.{n}.{leaf}" for leaf in ("self_attn.qkv_proj", "mlp.down_proj")]
        for n in range(30)
    }
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    assert [
        n for n in names if all(should_ignore_layer(name, ignore, fused) for name in names[n])
    ] == [1, 27]
    assert [
        n for n in names if any(should_ignore_layer(name, ignore, fused) for name in names[n])
    ] == [1, 27]
