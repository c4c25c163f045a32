"""LoRA adapters in real vLLM engines, of one worker on a thread and of two in processes, against
peft."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.lora.layers import LoRAMapping
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.adapters import HeldAdapter, with_adapter, with_plain_products
from openrlhf_ext.rollout.probe import WeightSyncMismatch, check_sync
from openrlhf_ext.rollout.response import InvalidWeights
from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import EngineFailed, WeightSyncError
from openrlhf_ext.rollout.sync.sender import WeightSender
from openrlhf_ext.rollout.worker_extension import WeightSyncExtension
from tests.patience import PATIENCE_S
from tests.rollout import tiny
from tests.rollout.forking import fork_workers
from tests.rollout.updates import fill_with, plan_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RANK, ALPHA = 3, 12
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "up_proj"]
PROBE = [(7 * i * i + 3) % tiny.VOCAB for i in range(150)]
"""More than a block of the prefix cache."""
TOLERANCE = 1e-4
PREFIX = "base_model.model.model.layers."


def base_model() -> LlamaForCausalLM:
    """Of a family whose logits vLLM would adapt too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).float().eval()


class Adapter:
    """One of peft's, strong enough to see, over the model that the engines have read from the
    disk."""

    def __init__(self, folder: Path, seed: int, targets: list[str], b: float) -> None:
        """``b``: the size of B's entries."""
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets)
        self.model = peft.get_peft_model(base_model(), config).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, b if "lora_B" in name else 0.1, generator=generator)
        self.model.save_pretrained(folder)
        stored = load_file(folder / "adapter_model.safetensors")
        self.sent = {
            name: tensor * (ALPHA / RANK if "lora_B" in name else 1)
            for name, tensor in stored.items()
        }

    def logprobs(self, tokens: list[int]) -> Tensor:
        return tiny.logprobs(self.model, tokens)


class AdaptedEngine(tiny.SabotagedEngine):
    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.slept: list[int] = []
        self.begun: list[asyncio.Task] = []
        await super().__init__(*args, **kwargs)

    async def in_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return await self.llm.collective_rpc(function, args=args)

    async def forget_adapters(self) -> None:
        """Requests ask for none any more."""
        self.llm = self.llm._llm

    async def recall_adapters(self) -> None:
        from openrlhf_ext.rollout.adapters import AdaptedEngine

        self.llm = AdaptedEngine(self.llm, lambda: self._weight_version)

    async def begin(self, token_ids: list[int], params: Any) -> None:
        """Have a request, and those before it, sample some tokens, and pause; `ended` has their
        outputs."""
        await self.pause_generation()
        self.begun.append(asyncio.create_task(self.generate(token_ids, params)))
        while len(tokens := await self.sampled_tokens()) < len(self.begun):
            await asyncio.sleep(0.001)
        enough = sum(tokens.values()) + 5 * len(tokens)
        await self.resume_generation()
        while sum((await self.sampled_tokens()).values()) < enough:
            await asyncio.sleep(0)
        await self.pause_generation()

    async def ended(self) -> list[Any]:
        begun, self.begun = self.begun, []
        await self.resume_generation()
        return await asyncio.gather(*begun)

    async def note_levels(self) -> list[int]:
        """At which it slept since the last call; on CPU nothing else happens."""
        slept, self.slept = self.slept, []
        return slept

    async def sleep(self, level: int = 1) -> None:
        await super().sleep(level)
        self.slept.append(level)


class Rig:
    def __init__(self, engine: Any, workers: int, folder: Path) -> None:
        self.engine, self.workers, self.version, self._folder = engine, workers, 0, folder
        self.sender: WeightSender | None = None

    def adapter(self, seed: int, targets: Sequence[str] = ALL, b: float = 0.1) -> Adapter:
        return Adapter(self._folder / f"{seed}", seed, list(targets), b)

    def send(self, tensors: dict[str, Tensor], missing: str = "") -> None:
        """In buckets that are smaller than some tensors; fails where it comes to ``missing``."""
        plan = plan_of(tensors, 2_000)
        if self.sender is None or not self.sender.connected or plan != self.plan:
            if self.sender is not None:
                self.sender.close()
            staging = find_transport("gloo").staging(plan, [[0]], PATIENCE_S)
            self.sender = WeightSender(
                "gloo", plan, staging, [self.engine], self.workers, PATIENCE_S
            )
            self.plan = plan
            self.sender.connect()
        self.version += 1
        self.sender.send(
            fill_with({name: t for name, t in tensors.items() if name != missing}), self.version
        )

    def spoil(self, kind: str) -> None:
        self.in_workers(spoil, kind)

    def in_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return ray.get(self.engine.in_workers.remote(function, *args), timeout=PATIENCE_S)

    def check(self, expected: Tensor) -> float:
        scored = ray.get(self.engine.probe_logprobs.remote(PROBE), timeout=PATIENCE_S)
        return check_sync(expected, [scored], TOLERANCE, self.version)

    def sample(self, length: int = 20, method: str = "generate", temperature: float = 1.0) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=length, ignore_eos=True, temperature=temperature, seed=1, logprobs=0
        )
        return ray.get(getattr(self.engine, method).remote(PROBE[:8], params), timeout=PATIENCE_S)


def logprobs_of(output: Any) -> Tensor:
    (completion,) = output.outputs
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return torch.tensor([at[token].logprob for token, at in pairs])


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
            tensors = {
                f"{PREFIX}{other[name[len(PREFIX)]]}{name[len(PREFIX) + 1 :]}": t
                for name, t in tensors.items()
            }
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


def drop_adapters(worker: WeightSyncExtension) -> None:
    """With what its layers hold of them."""
    worker.reload_weights()
    manager = worker.model_runner.lora_manager
    assert manager.list_adapters() == set()
    for layer in manager._adapter_manager.modules.values():
        layer.reset_lora(0)


def forget_all(worker: WeightSyncExtension) -> None:
    """As when it started."""
    held: Any = worker._adapter
    held._put(held._layers.create_dummy_lora(1, 1, held._manager.embedding_modules))


def stacks(worker: WeightSyncExtension) -> Tensor:
    """What all layers hold."""
    layers = worker.model_runner.lora_manager._adapter_manager.modules.values()
    linear = [layer for layer in layers if isinstance(layer, BaseLinearLayerWithLoRA)]
    return torch.cat(
        [
            each.flatten()
            for layer in linear
            for each in (*layer.lora_a_stacked, *layer.lora_b_stacked)
        ]
    )


# ---- engines


@pytest.fixture(scope="module")
def rigs(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Rig]]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save_checkpoint(folder, tied=False)
    base_model().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RolloutEngine", AdaptedEngine)
        fork_workers(patch)
        engines = {
            workers: launch.create_rollout_engines(
                str(folder),
                Vllm(
                    tensor_parallel_size=workers,
                    dtype="fp32",
                    kv_cache_mib=32,
                    max_requests=16,
                    enable_prefix_caching=True,
                    speculative={"method": "ngram"},
                ),
                seed=3,
                max_model_len=256,
                request_timeout_s=PATIENCE_S,
                use_gpu=False,
                adapter=(RANK, ALL),
                executor_factory=partial(tiny.CountingExecutor, 0.0),
            )[0]
            for workers in (1, 2)
        }
    launch.wait_until_ready([*engines.values()], PATIENCE_S)
    yield {workers: Rig(engine, workers, folder) for workers, engine in engines.items()}
    for engine in engines.values():
        ray.kill(engine)


@pytest.fixture(params=[1, 2])
def rig(rigs: dict[int, Rig], request: pytest.FixtureRequest) -> Rig:
    return rigs[request.param]


def test_before_the_first_adapter_the_base_answers_and_afterwards_it_does_as_in_peft(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    base = tiny.logprobs(base_model(), PROBE)
    rig.check(base)
    before = rig.sample()
    one = rig.adapter(1)
    with caplog.at_level(logging.INFO):
        rig.send(one.sent)
    assert (
        "checksums of 28 tensors agree as the engines hold them, of 0 as the engines received"
        in caplog.text
    )
    rig.check(one.logprobs(PROBE))
    assert (one.logprobs(PROBE) - base).abs().mean() > 0.5
    after = rig.sample()
    tokens = [*PROBE[:8], *after.outputs[0].token_ids]
    assert (one.logprobs(tokens)[7:] - logprobs_of(after)).abs().max() < TOLERANCE
    assert before.outputs[0].token_ids != after.outputs[0].token_ids


def test_drafts_are_checked_with_the_adapter(rig: Rig) -> None:
    one, cold = rig.adapter(9), 0.05  # which repeats itself
    rig.send(one.sent)
    output = rig.sample(100, temperature=cold)
    (completion,) = output.outputs
    assert sum(completion.spec_decode_metrics.histogram[1:]) > 0
    tokens = [*PROBE[:8], *completion.token_ids]
    ours = tiny.logprobs(one.model, tokens, cold)[7:]
    assert (ours - logprobs_of(output)).abs().max() < TOLERANCE / cold


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


@pytest.mark.parametrize(
    ("kind", "workers", "names"),
    [
        ("kept", 1, "0: 28 of 28: "),
        ("kept", 2, "0: 28 of 28: "),
        ("swapped layers", 2, "0: 28 of 28: "),
        ("wrong slice", 2, f"0: 1 of 28: {PREFIX}1.self_attn.o_proj.lora_A.weight$"),
        ("one value of A", 2, f"0: 1 of 28: {PREFIX}0.self_attn.k_proj.lora_A.weight$"),
        ("one value of B", 1, f"0: 1 of 28: {PREFIX}0.self_attn.v_proj.lora_B.weight$"),
        ("padding", 2, f"0: 1 of 28: {PREFIX}0.self_attn.q_proj.lora_B.weight$"),
    ],
)
def test_what_a_worker_holds_is_not_what_was_sent(
    rigs: dict[int, Rig], kind: str, workers: int, names: str
) -> None:
    rig = rigs[workers]
    one, two = rig.adapter(6), rig.adapter(7)
    rig.send(one.sent)
    rig.spoil(kind)
    with pytest.raises(WeightSyncMismatch, match=f"engine {names}"):
        rig.send(two.sent)
    rig.spoil("")
    if kind == "kept":
        rig.check(one.logprobs(PROBE))
        with pytest.raises(WeightSyncMismatch, match="engine 0: MISMATCH"):
            rig.check(two.logprobs(PROBE))
    rig.send(two.sent)
    rig.check(two.logprobs(PROBE))


def test_an_engine_that_never_got_an_adapter_and_requests_without_one_are_seen_by_the_probe(
    rig: Rig,
) -> None:
    one, base = rig.adapter(8), tiny.logprobs(base_model(), PROBE)
    rig.in_workers(forget_all)
    rig.spoil("kept")
    with pytest.raises(WeightSyncMismatch, match="engine 0: 28 of 28: "):
        rig.send(one.sent)
    rig.spoil("")
    rig.check(base)
    with pytest.raises(WeightSyncMismatch, match="engine 0: MISMATCH"):
        rig.check(one.logprobs(PROBE))
    ray.get(rig.engine.forget_adapters.remote())
    rig.send(one.sent)
    with pytest.raises(WeightSyncMismatch, match="engine 0: MISMATCH"):
        rig.check(one.logprobs(PROBE))
    rig.check(base)
    ray.get(rig.engine.recall_adapters.remote())
    rig.check(one.logprobs(PROBE))


Q_A = f"{PREFIX}0.self_attn.q_proj.lora_A.weight"


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda sent: {name.replace(old, new): tensor for name, tensor in sent.items()}


def with_tensor(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda sent: {**sent, name: tensor}


REFUSED: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = [
    (renamed("model.model.layers", "model.layers"), "and 23 more"),
    (
        renamed("q_proj", "query"),
        r"self_attn.query.lora_A.weight: no linear layer of the engine's model has",
    ),
    (renamed("q_proj", "qkv_proj"), r"self_attn.qkv_proj.lora_A.weight: no linear layer"),
    (
        with_tensor("base_model.model.lm_head.lora_A.weight", torch.ones(RANK, 64)),
        "lm_head.lora_A.weight: no linear",
    ),
    (with_tensor("model.norm.weight", torch.ones(64)), "model.norm.weight: no linear layer"),
    (
        lambda sent: {n: t for n, t in sent.items() if n != Q_A},
        "0.self_attn.q_proj: has one of lora_A and lora_B",
    ),
    (
        with_tensor(Q_A, torch.ones(RANK + 1, 64)),
        r"tensors are of ranks \[3, 4\], should be of one up to 8",
    ),
    (with_tensor(Q_A, torch.ones(RANK, 65)), r"has the shape \(3, 65\), the layer's is 64 long"),
    (
        with_tensor(Q_A, torch.ones(RANK, 64).bfloat16()),
        "is torch.bfloat16, the engine's adapters are torch.float32",
    ),
    (
        lambda sent: {"model.norm.weight": torch.ones(64)},
        r"brings all weights, the engine was started for adapters",
    ),
]


@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_an_adapter_that_does_not_fit_is_named_before_the_old_one_is_touched(
    rigs: dict[int, Rig], change: Callable[[dict[str, Tensor]], dict[str, Tensor]], says: str
) -> None:
    rig, one = rigs[1], rigs[1].adapter(9)
    rig.send(one.sent)
    with pytest.raises(EngineFailed, match=says):
        rig.send(change(rig.adapter(10).sent))
    rig.check(one.logprobs(PROBE))


def test_after_an_update_that_broke_off_the_old_adapter_is_whole_and_nothing_is_sampled(
    rigs: dict[int, Rig],
) -> None:
    rig, one, two = rigs[1], rigs[1].adapter(11), rigs[1].adapter(12)
    rig.send(one.sent)
    held = rig.in_workers(stacks)
    with pytest.raises(KeyError):
        rig.send(two.sent, missing=Q_A)
    with pytest.raises(InvalidWeights, match="update to version .* failed"):
        rig.check(two.logprobs(PROBE))
    assert all(map(torch.equal, held, rig.in_workers(stacks)))
    rig.send(two.sent)
    rig.check(two.logprobs(PROBE))


def test_an_adapter_that_vllm_has_dropped_is_there_again_when_a_request_asks_for_it(
    rig: Rig,
) -> None:
    one = rig.adapter(13)
    rig.send(one.sent)
    rig.check(one.logprobs(PROBE))  # asked for with the update
    held = rig.in_workers(stacks)
    rig.in_workers(drop_adapters)
    rig.check(one.logprobs(PROBE))
    assert all(map(torch.equal, held, rig.in_workers(stacks)))


def test_a_request_in_flight_goes_on_with_the_new_adapter(rig: Rig) -> None:
    """Beside new ones, whose name for it is another; begun without any of an update's, too."""
    rig.in_workers(forget_all)
    models = {rig.version: rig.adapter(0, b=0.0)}
    for adapter in (rig.adapter(14), rig.adapter(15)):
        rig.sample(200, "begin")
        rig.send(adapter.sent)
        models[rig.version] = adapter
    outputs = ray.get(rig.engine.ended.remote(), timeout=PATIENCE_S)
    for output in outputs:
        (completion,) = output.outputs
        tokens, sampled = [*PROBE[:8], *completion.token_ids], logprobs_of(output)
        for version, start, end in completion.weight_versions:
            expected = models[version].logprobs(tokens)[7:][start:end]
            assert (expected - sampled[start:end]).abs().max() < TOLERANCE, (version, start, end)
    assert [len(output.outputs[0].weight_versions) for output in outputs] == [3, 2]
    rig.check(models[rig.version].logprobs(PROBE))


def test_an_engine_that_keeps_its_base_does_not_sleep_without_it(rigs: dict[int, Rig]) -> None:
    rig, one = rigs[1], rigs[1].adapter(16)
    ray.get(rig.engine.note_levels.remote())
    with pytest.raises(ValueError, match="cannot sleep at level 2: its base would be lost"):
        ray.get(rig.engine.sleep.remote(2))
    ray.get(rig.engine.wake_weights.remote())
    with pytest.raises(InvalidWeights, match="given up for an update"):
        ray.get(rig.engine.probe_logprobs.remote(PROBE))
    rig.send(one.sent)
    ray.get(rig.engine.wake_up.remote())
    rig.check(one.logprobs(PROBE))
    assert ray.get(rig.engine.note_levels.remote()) == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_prefill", [True, False])
def test_where_all_tokens_have_the_adapter_plain_products_are_vllms(
    dtype: torch.dtype, is_prefill: bool
) -> None:
    """Two stacks of a layer; then a request that does not ask for the adapter, which is left to
    vLLM."""
    wrapper, taken = PunicaWrapperCPU(16, 4, "cpu"), []
    general = wrapper.add_lora_linear

    def noted(*arguments: Any) -> None:
        taken.append(1)
        general(*arguments)

    wrapper.add_lora_linear = noted
    with_plain_products(wrapper)
    x_TK = torch.randn(6, 32).to(dtype)
    stacked_a = [torch.randn(1, 1, 8, 32).to(dtype) for _ in range(2)]
    stacked_b = [torch.randn(1, 1, width, 8).to(dtype) for width in (24, 16)]
    for last, by_vllm in ((1, []), (0, [1])):
        mapping = LoRAMapping((1, 1, 1, 1, last, last), (1, 1, 1, 1, last, last), is_prefill)
        wrapper.update_metadata(mapping, [1], 1, 64)
        found_TN, expected_TN = (torch.ones(6, 40, dtype=dtype) for _ in range(2))
        wrapper.add_lora_linear(found_TN, x_TK, stacked_a, stacked_b, 1.0, (24, 16))
        general(expected_TN, x_TK, stacked_a, stacked_b, 1.0, (24, 16))
        assert taken == by_vllm
        torch.testing.assert_close(found_TN, expected_TN)


@pytest.mark.parametrize(
    ("rank", "largest"), [(1, 1), (3, 8), (8, 8), (9, 16), (65, 128), (512, 512)]
)
def test_the_engine_has_room_for_the_rank(rank: int, largest: int) -> None:
    assert with_adapter({"model": "m"}, rank, ALL)["max_lora_rank"] == largest


def test_a_rank_that_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 512 at most, got 513"):
        with_adapter({}, 513, ALL)


def test_an_adapter_for_an_engine_that_was_started_without_is_refused() -> None:
    plan = plan_of({Q_A: torch.ones(3, 64)}, 1000)
    with pytest.raises(
        WeightSyncError, match="brings adapters, the engine was started for all weights"
    ):
        WeightSyncExtension().connect_weight_receiver(plan.to_wire(), {})
