"""What real vLLM workers hold: bf16, two workers, fused and padded parameters, keys and values held
twice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.probe import WeightSyncMismatch
from tests.patience import PATIENCE_S
from tests.rollout import spoiling, tiny
from tests.rollout.forking import fork_workers
from tests.rollout.updates import fill_with, send_together, two_senders

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

VOCAB = 530
"""Two workers have 288 places each, of which 46 of the second are padding."""


class Rig:
    """An engine of two workers, two senders, and the weights that were sent last."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.version = engine, 0
        model = tiny.random_model(seed=1, tied=False, vocab=VOCAB)
        self.weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        self.senders = two_senders(self.weights, 30_000, [self.engine], 2)

    def step(self) -> dict[str, Tensor]:
        """Every weight one optimizer step of 1e-6 on, as far as bf16 shows it."""
        generator = torch.Generator().manual_seed(self.version)
        signs = {
            n: torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
            for n, t in self.weights.items()
        }
        self.weights = {
            n: (t.float() + 1e-6 * signs[n]).bfloat16() for n, t in self.weights.items()
        }
        return self.weights

    def send(self) -> None:
        self.version += 1
        send_together(self.senders, fill_with(self.weights), self.version)

    def spoil(self, kind: str) -> None:
        ray.get(self.engine.spoil.remote(kind))


class SpoiledEngine(tiny.SabotagedEngine):
    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        await super().__init__(*args, worker_extension_cls=spoiling.QUALIFIED_NAME, **kwargs)

    async def head_dtype(self) -> str:
        return str(self.llm.model_config.head_dtype)

    async def call_workers(self, method: str) -> list[Any]:
        return await self.llm.collective_rpc(method)

    async def spoil(self, kind: str) -> None:
        await self.llm.collective_rpc("spoil", args=(kind,))


@pytest.fixture(scope="module")
def rig(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.save_checkpoint(folder, tied=False, vocab=VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RolloutEngine", SpoiledEngine)
        fork_workers(patch)
        engines = launch.create_rollout_engines(
            str(folder),
            Vllm(tensor_parallel_size=2, dtype="bf16", kv_cache_mib=32, max_requests=16),
            seed=3,
            max_model_len=256,
            request_timeout_s=PATIENCE_S,
            use_gpu=False,
            executor_factory=partial(tiny.CountingExecutor, 0.0),
        )
    launch.wait_until_ready(engines, PATIENCE_S)
    yield Rig(engines[0])
    ray.kill(engines[0])


def test_logits_of_a_bf16_engine_are_not_rounded(rig: Rig) -> None:
    assert ray.get(rig.engine.head_dtype.remote(), timeout=PATIENCE_S) == "torch.float32"


def test_an_engine_in_processes_of_its_own_tells_the_log_probs_of_what_it_sampled(rig: Rig) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=40, ignore_eos=True, temperature=1.0, seed=1, logprobs=0, flat_logprobs=True
    )
    (completion,) = ray.get(
        rig.engine.generate.remote(list(range(8)), params), timeout=PATIENCE_S
    ).outputs
    probe = rig.engine.probe_logprobs.remote([*range(8), *completion.token_ids])
    expected = torch.tensor(ray.get(probe, timeout=PATIENCE_S)[7:])
    assert len(completion.logprobs.logprobs) == 40
    assert (expected - torch.tensor(completion.logprobs.logprobs)).abs().max() < 0.05  # bf16


def test_every_tensor_is_found_where_two_workers_hold_it(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rig.send()
    count = len(rig.weights)
    assert (
        f"checksums of {count} tensors agree as the engines hold them, of 0 as the engines received"
        in caplog.text
    )
    rig.step()
    rig.send()


def test_an_update_brings_all_that_a_sleep_before_it_gives_up(rig: Rig) -> None:
    """The places of padding too."""
    ray.get(rig.engine.call_workers.remote("lose_weights"), timeout=PATIENCE_S)
    assert min(ray.get(rig.engine.call_workers.remote("count_lost"), timeout=PATIENCE_S)) > 0
    rig.send()
    assert ray.get(rig.engine.call_workers.remote("count_lost"), timeout=PATIENCE_S) == [0, 0]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("stale", r"engine 0: \d+ of 27: model.embed_tokens.weight, .*, and \d+ more$"),
        ("lost shard", rf"engine 0: 1 of 27: {spoiling.LOST}$"),
        (
            "swapped",
            "engine 0: 2 of 27: {}, {}$".format(
                *(f"model.layers.0.self_attn.{k}" for k in spoiling.SWAPPED)
            ),
        ),
    ],
)
def test_a_step_of_1e_6_that_did_not_get_everywhere_is_seen_and_named(
    rig: Rig, kind: str, names: str
) -> None:
    rig.send()
    rig.spoil(kind)
    rig.step()
    with pytest.raises(WeightSyncMismatch, match=names):
        rig.send()
    rig.spoil("")
    rig.send()
