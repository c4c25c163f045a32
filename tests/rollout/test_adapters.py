"""LoRA adapters in real vLLM engines, of one worker on a thread and of two in processes, against peft."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.adapters import HeldAdapter, with_adapter
from openrlhf_ext.rollout.probe import WeightSyncMismatch, check_sync
from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import EngineFailed, WeightSyncError
from openrlhf_ext.rollout.sync.sender import WeightSender
from openrlhf_ext.rollout.worker_extension import WeightSyncExtension
from tests.patience import PATIENCE_S
from tests.rollout import tiny
from tests.rollout.updates import fill_with, plan_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANK, ALPHA = 3, 12
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "up_proj"]
PROBE = [(7 * i * i + 3) % tiny.VOCAB for i in range(150)]
"""More than a block of the prefix cache."""
TOLERANCE = 1e-4
PREFIX = "base_model.model.model.layers."


class Adapter:
    """One of peft's, strong enough to see, over the model that the engines have read from the disk."""

    def __init__(self, folder: Path, seed: int, targets: list[str]) -> None:
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
        self.model = peft.get_peft_model(tiny.random_model(seed=0, tied=False), config).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1, generator=generator)
        self.model.save_pretrained(folder)
        stored = load_file(folder / "adapter_model.safetensors")
        self.sent = {name: tensor * (ALPHA / RANK if "lora_B" in name else 1) for name, tensor in stored.items()}

    def logprobs(self, tokens: list[int]) -> Tensor:
        return tiny.logprobs(self.model, tokens)


class AdaptedEngine(tiny.SabotagedEngine):
    async def in_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return await self.llm.collective_rpc(function, args=args)

    async def forget_adapters(self) -> None:
        """Requests ask for none any more."""
        self.llm = self.llm._llm

    async def recall_adapters(self) -> None:
        from openrlhf_ext.rollout.adapters import AdaptedEngine

        self.llm = AdaptedEngine(self.llm, lambda: self._weight_version)

    async def levels(self) -> list[int]:
        """At which it slept from now on."""
        slept: list[int] = []

        async def sleep(level: int) -> None:
            slept.append(level)

        self.llm.sleep, self.slept = sleep, slept
        return slept


class Rig:
    def __init__(self, engine: Any, workers: int, folder: Path) -> None:
        self.engine, self.workers, self.version, self._folder = engine, workers, 0, folder
        self.sender: WeightSender | None = None

    def adapter(self, seed: int, targets: list[str] = ALL) -> Adapter:
        return Adapter(self._folder / f"{seed}", seed, targets)

    def send(self, tensors: dict[str, Tensor]) -> None:
        """Buckets are smaller than some tensors, and not the first plan that these engines get."""
        plan = plan_of(tensors, 2_000)
        staging = find_transport("gloo").staging(plan, [[0]], PATIENCE_S)
        sender = WeightSender("gloo", plan, staging, [self.engine], self.workers, PATIENCE_S)
        sender.connect()
        self.version += 1
        try:
            sender.send(fill_with(tensors), self.version)
        finally:
            sender.close()

    def spoil(self, kind: str) -> None:
        self.in_workers(spoil, kind)

    def in_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return ray.get(self.engine.in_workers.remote(function, *args), timeout=PATIENCE_S)

    def check(self, expected: Tensor) -> float:
        scored = ray.get(self.engine.probe_logprobs.remote(PROBE), timeout=PATIENCE_S)
        return check_sync(expected, [scored], TOLERANCE, self.version)

    def sample(self, length: int = 20) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0, seed=1, logprobs=0)
        return self.engine.generate.remote(PROBE[:8], params)


def logprobs_of(output: Any) -> Tensor:
    (completion,) = output.outputs
    return torch.tensor([at[token].logprob for token, at in zip(completion.token_ids, completion.logprobs)])


# ---- what goes wrong in a worker, given to it by name


def spoil(worker: WeightSyncExtension, kind: str) -> None:
    """What the next updates do there; "": what they should."""
    held = worker._adapter
    assert held is not None
    replace = HeldAdapter.replace.__get__(held)

    def spoiled(stream: Iterable[tuple[str, Tensor]]) -> None:
        tensors = {name: tensor.clone() for name, tensor in stream}
        if kind == "kept":
            return
        if kind == "swapped layers":
            other = {"0": "1", "1": "0"}
            tensors = {f"{PREFIX}{other[name[len(PREFIX)]]}{name[len(PREFIX) + 1:]}": t for name, t in tensors.items()}
        layers = worker.model_runner.lora_manager._adapter_manager.modules
        o_proj = layers["model.layers.1.self_attn.o_proj"]
        if kind == "wrong slice" and worker.rank == 1:
            o_proj.tp_rank = 0
        replace(tensors.items())
        o_proj.tp_rank = worker.rank
        qkv = layers["model.layers.0.self_attn.qkv_proj"]
        if kind == "one value of A" and worker.rank == 0:
            qkv.lora_a_stacked[1][0, 0, 2, 5] *= 1.0001
        if kind == "one value of B":
            qkv.lora_b_stacked[2][0, 0, 3, 1] *= 1.0001
        if kind == "padding":
            qkv.lora_b_stacked[0][0, 0, 0, RANK] = 1e-3

    held.replace = replace if not kind else spoiled  # type: ignore[method-assign]


def lose_adapter(worker: WeightSyncExtension) -> None:
    worker.reload_weights()
    assert worker.model_runner.lora_manager.list_adapters() == set()


# ---- engines


@pytest.fixture(scope="module")
def rigs(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rig]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save_checkpoint(folder, tied=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RolloutEngine", AdaptedEngine)
        engines = {
            workers: launch.create_rollout_engines(
                str(folder),
                Vllm(
                    tensor_parallel_size=workers, dtype="fp32", kv_cache_mib=32, max_requests=16,
                    enable_prefix_caching=True,
                ),
                seed=3, max_model_len=256, request_timeout_s=PATIENCE_S, use_gpu=False, adapter_rank=RANK,
                executor_factory=partial(tiny.CountingExecutor, 0.0),
            )[0]
            for workers in (1, 2)
        }  # fmt: skip
    launch.wait_until_ready([*engines.values()], PATIENCE_S)
    return {workers: Rig(engine, workers, folder) for workers, engine in engines.items()}


@pytest.fixture(params=[1, 2])
def rig(rigs: dict[int, Rig], request: pytest.FixtureRequest) -> Rig:
    return rigs[request.param]


def test_before_the_first_adapter_the_base_answers_and_afterwards_it_does_as_in_peft(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    base = tiny.logprobs(tiny.random_model(seed=0, tied=False), PROBE)
    rig.check(base)
    before = ray.get(rig.sample(), timeout=PATIENCE_S)
    one = rig.adapter(1)
    with caplog.at_level(logging.INFO):
        rig.send(one.sent)
    assert "checksums of 28 tensors agree as the engines hold them, of 0 as the engines received" in caplog.text
    rig.check(one.logprobs(PROBE))
    assert (one.logprobs(PROBE) - base).abs().mean() > 0.5
    after = ray.get(rig.sample(), timeout=PATIENCE_S)
    tokens = [*PROBE[:8], *after.outputs[0].token_ids]
    assert (one.logprobs(tokens)[7:] - logprobs_of(after)).abs().max() < TOLERANCE
    assert before.outputs[0].token_ids != after.outputs[0].token_ids


def test_some_targets_are_adapted_and_the_others_lose_what_they_had(rig: Rig) -> None:
    rig.send(rig.adapter(2).sent)
    some = rig.adapter(3, SOME)
    rig.send(some.sent)
    rig.check(some.logprobs(PROBE))


def test_a_version_is_not_answered_from_another_s_keys_and_values(rig: Rig) -> None:
    """Even where the cache was not dropped."""
    rig.send(rig.adapter(4).sent)
    ray.get(rig.engine.probe_logprobs.remote(PROBE), timeout=PATIENCE_S)
    ray.get(rig.engine.sabotage.remote(forget_to_reset=True))
    two = rig.adapter(5)
    rig.send(two.sent)
    rig.check(two.logprobs(PROBE))
    ray.get(rig.engine.sabotage.remote(forget_to_reset=False))
