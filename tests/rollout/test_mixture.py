"""Engines of mixtures of experts: in the actor's process, and in two workers that vLLM spawns.
Log-probs and experts are those of transformers, before and after updates; what is not held as it
was sent is named."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from openrlhf_ext.options.sections import Reward, Vllm
from openrlhf_ext.rewards.executor import make_executor
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.probe import WeightSyncMismatch
from openrlhf_ext.rollout.response import GroupRequest, Response, Sampling
from openrlhf_ext.rollout.sync.sender import SendReport
from tests.patience import PATIENCE_S
from tests.rollout import mixture, tiny
from tests.rollout.updates import fill_with, halted_in_flight, send_together, two_senders

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOLERANCE = 1e-5
PROMPTS = [[3 + i * 7 % 500 for i in range(length)] for length in (3, 30, 140)]


class SpoiledEngine(tiny.SabotagedEngine):
    extension = "tests.rollout.spoiled_loads.SpoilingExtension"

    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        await super().__init__(*args, worker_extension_cls=self.extension, **kwargs)

    async def spoil(self, kind: str, names: tuple[str, ...]) -> None:
        await self.llm.collective_rpc("spoil", args=(kind, names))

    async def call_workers(self, method: str) -> list[Any]:
        return await self.llm.collective_rpc(method)


class UnpackedEngine(SpoiledEngine):
    """Whose linear layers stay as they are sent, as on a GPU."""

    extension = "tests.rollout.spoiling.SpoilingExtension"


class Rig:
    """An engine, two senders, and the model whose weights were sent last."""

    def __init__(self, engine: Any, family: str, workers: int) -> None:
        self.engine, self.family, self.workers, self.version = engine, family, workers, 0
        self.model = mixture.random_model(0, family)
        self.connect()

    def connect(self) -> None:
        self.senders = two_senders(mixture.tensors(self.model), 20_000, [self.engine], self.workers)

    def send(self, seed: int) -> SendReport:
        self.version += 1
        self.model = mixture.random_model(seed, self.family)
        return send_together(self.senders, fill_with(mixture.tensors(self.model)), self.version)

    def spoil(self, kind: str, *names: str) -> None:
        ray.get(self.engine.spoil.remote(kind, names), timeout=PATIENCE_S)

    def generate(self, prompts: list[list[int]], **params: Any) -> list[Any]:
        from vllm import SamplingParams

        asked = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "logprobs": 0, **params})
        return ray.get(
            [self.engine.generate.remote(prompt, asked) for prompt in prompts], timeout=PATIENCE_S
        )

    def check(self, output: Any) -> None:
        """Every number that vLLM tells of a completion, in vLLM's form."""
        (completion,) = output.outputs
        told = [
            at[token].logprob
            for token, at in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        truth = mixture.truth(self.model, [*output.prompt_token_ids, *completion.token_ids])
        off = truth.logprobs_R[len(output.prompt_token_ids) - 1 :] - torch.tensor(told)
        assert off.abs().max() < TOLERANCE
        assert completion.routed_experts.dtype == np.uint8
        assert torch.equal(mixture.in_order(completion.routed_experts), truth.experts_RLK)


def start(kind: type, family: str, folder: Path, workers: int) -> Any:
    mixture.save_checkpoint(folder, family)
    options = Vllm(
        tensor_parallel_size=workers,
        dtype="fp32",
        enable_prefix_caching=True,
        kv_cache_mib=32,
        max_requests=16,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RolloutEngine", kind)
        return launch.create_rollout_engines(
            str(folder),
            options,
            seed=3,
            max_model_len=256,
            request_timeout_s=PATIENCE_S,
            use_gpu=False,
            executor_factory=make_executor(Reward()),
            tells_entropies=True,
            routed_experts=True,
        )[0]


@pytest.fixture(scope="module")
def engines(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Started together to save time."""
    folder = tmp_path_factory.mktemp("mixtures")
    found = [
        start(SpoiledEngine, "qwen3_moe", folder / "alone", 1),
        start(UnpackedEngine, "qwen2_moe", folder / "two", 2),
    ]
    launch.wait_until_ready(found, PATIENCE_S)
    yield found
    for engine in found:
        ray.kill(engine)


@pytest.fixture(scope="module")
def alone(engines: list[Any]) -> Rig:
    """Qwen3-MoE in the process of the actor."""
    return Rig(engines[0], "qwen3_moe", 1)


@pytest.fixture(scope="module")
def two(engines: list[Any]) -> Rig:
    """Qwen2-MoE, which has a shared expert, in two workers, which have patches only from the worker
    extension."""
    return Rig(engines[1], "qwen2_moe", 2)


@pytest.fixture(params=["alone", "two"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


def test_log_probs_and_experts_are_those_of_the_weights_that_came_last(rig: Rig) -> None:
    for seed in (None, 1, 2):
        if seed is not None:
            rig.send(seed)
        for _ in range(2):  # the second time prompts are in the prefix cache
            for output in rig.generate(PROMPTS, temperature=1.0):
                rig.check(output)


def test_the_probe_is_answered_beside_requests_that_ask_for_experts(rig: Rig) -> None:
    rig.send(1)
    probe = ray.get(rig.engine.probe_logprobs.remote(PROMPTS[2]), timeout=PATIENCE_S)
    assert (
        torch.tensor(probe) - mixture.truth(rig.model, PROMPTS[2]).logprobs_R
    ).abs().max() < TOLERANCE


def test_an_update_brings_all_that_a_sleep_before_it_gives_up(rig: Rig) -> None:
    """Packed experts, too, and the places of padding among them."""
    ray.get(rig.engine.call_workers.remote("lose_weights"), timeout=PATIENCE_S)
    assert min(ray.get(rig.engine.call_workers.remote("count_lost"), timeout=PATIENCE_S)) > 0
    rig.send(2)
    assert max(ray.get(rig.engine.call_workers.remote("count_lost"), timeout=PATIENCE_S)) == 0
    rig.check(rig.generate(PROMPTS[1:2])[0])


def test_after_an_update_that_broke_off_the_next_one_packs_once(alone: Rig) -> None:
    missing = "model.layers.2.mlp.experts.4.up_proj.weight"
    tensors = mixture.tensors(mixture.random_model(3, alone.family))
    tensors.pop(missing)
    with pytest.raises(KeyError, match=missing):
        send_together(alone.senders, fill_with(tensors), alone.version + 1)
    alone.connect()
    alone.send(4)
    for output in alone.generate(PROMPTS):
        alone.check(output)


def summed(rig: Rig, caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """Tensors that are summed as the engine holds them, and as it received them."""
    rig.senders[0]._told = False
    with caplog.at_level(logging.INFO):
        rig.send(3)
    found = re.search(
        r"checksums of (\d+) tensors agree as the engines hold them, of (\d+) as the engines",
        caplog.text,
    )
    assert found is not None
    return int(found[1]), int(found[2])


def test_only_linear_layers_are_packed_as_those_of_a_dense_model(
    alone: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    received = 5 * mixture.LAYERS  # q, k, v, o and the router
    assert summed(alone, caplog) == (len(mixture.tensors(alone.model)) - received, received)


def test_every_tensor_is_summed_where_two_workers_hold_it(
    two: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    assert summed(two, caplog) == (len(mixture.tensors(two.model)), 0)


EXPERT, OTHER = "model.layers.1.mlp.experts.3", "model.layers.1.mlp.experts.5"
PARTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        *(("stale ones", [f"{EXPERT}.{part}"]) for part in PARTS),
        ("stale ones", [f"{EXPERT}.{part}" for part in PARTS]),
        *(("swapped pair", [f"{EXPERT}.{part}", f"{OTHER}.{part}"]) for part in PARTS),
        ("swapped pair", [f"{EXPERT}.{part}" for part in PARTS[:2]]),
        ("left out", [f"{EXPERT}.{PARTS[1]}"]),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(name.split(".", 5)[5] for name in value)
    ),
)
def test_experts_that_are_not_where_they_belong_are_named(
    rig: Rig, kind: str, names: list[str]
) -> None:
    named_if_wrong(rig, kind, names)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate.weight",
        "mlp.shared_expert.up_proj.weight",
        "mlp.shared_expert.down_proj.weight",
        "mlp.shared_expert_gate.weight",
        "post_attention_layernorm.weight",
    ],
)
def test_what_a_mixture_has_beside_its_experts_is_named(two: Rig, name: str) -> None:
    named_if_wrong(two, "stale ones", [f"model.layers.1.{name}"])


@pytest.mark.parametrize("part", PARTS)
def test_an_expert_that_is_stale_on_one_of_two_workers_is_named(two: Rig, part: str) -> None:
    named_if_wrong(two, "stale ones of one worker", [f"{EXPERT}.{part}"])


def named_if_wrong(rig: Rig, kind: str, names: list[str]) -> None:
    """All of them, and no others."""
    rig.send(4)
    rig.spoil(kind, *names)
    listed = sorted(names, key=list(mixture.tensors(rig.model)).index)
    pattern = rf"engine 0: {len(names)} of \d+: {', '.join(listed)}$"
    with pytest.raises(WeightSyncMismatch, match=pattern):
        rig.send(5)
    rig.spoil("")
    rig.send(6)
    (output,) = rig.generate(PROMPTS[1:2])
    rig.check(output)


def test_an_update_in_the_middle_leaves_rows_to_the_weights_that_sampled(rig: Rig) -> None:
    """Those of a prompt are of the weights that sampled the first token."""
    from vllm import SamplingParams

    rig.send(7)
    models = {rig.version: rig.model}
    asked = SamplingParams(max_tokens=190, ignore_eos=True, logprobs=0, temperature=1.0)
    running = halted_in_flight(
        rig.engine, lambda: [rig.engine.generate.remote(PROMPTS[1], asked) for _ in range(4)]
    )
    rig.send(8)
    models[rig.version] = rig.model
    for output in ray.get(running, timeout=PATIENCE_S):
        (completion,) = output.outputs
        assert len(completion.weight_versions) == 2
        tokens = [*PROMPTS[1], *completion.token_ids]
        experts_RLK = mixture.in_order(completion.routed_experts)
        assert len(experts_RLK) == len(tokens) - 1
        for version, first, end in completion.weight_versions:
            rows = slice(
                0 if first == 0 else len(PROMPTS[1]) - 1 + first, len(PROMPTS[1]) - 1 + end
            )
            assert torch.equal(
                experts_RLK[rows], mixture.truth(models[version], tokens).experts_RLK[rows]
            )


def test_a_stop_string_ends_rows_with_its_tokens(rig: Rig) -> None:
    """It is found outside of the scheduler, which sends rows at every step."""
    whole = rig.generate([PROMPTS[1]], seed=3, detokenize=True)[0]
    stop = whole.outputs[0].text[len(whole.outputs[0].text) // 2]
    (cut,) = rig.generate([PROMPTS[1]], seed=3, detokenize=True, stop=[stop])
    assert cut.outputs[0].stop_reason == stop and 0 < len(cut.outputs[0].token_ids) < 12
    rig.check(cut)


def test_a_completion_without_log_probs_has_rows(alone: Rig) -> None:
    (output,) = alone.generate([PROMPTS[1]], logprobs=None)
    rows = mixture.truth(alone.model, [*PROMPTS[1], *output.outputs[0].token_ids]).experts_RLK
    assert torch.equal(mixture.in_order(output.outputs[0].routed_experts), rows)


def whole(rig: Rig, response: Response) -> None:
    truth = mixture.truth(rig.model, response.tokens_S.tolist())
    assert torch.equal(mixture.in_order(response.experts_RLK), truth.experts_RLK)
    expected_T = torch.cat(
        [truth.logprobs_R[start - 1 : stop - 1] for start, stop in response.actions]
    )
    assert (expected_T - torch.tensor(response.logprobs_T)).abs().max() < TOLERANCE


def test_responses_have_rows_beside_log_probs_and_entropies(rig: Rig) -> None:
    request = GroupRequest("what is 12 times 31?", "", 4, Sampling(1.0, 1.0, 8, 64), (1,))
    called = rig.engine.generate_group.options(num_returns=2).remote(request)
    responses, experts = ray.get(called, timeout=PATIENCE_S)
    assert len(responses) == len(experts) == 4 and all(
        response.experts_RLK is None for response in responses
    )
    for response, experts_RLK in zip(responses, experts, strict=True):
        whole(rig, replace(response, experts_RLK=experts_RLK))
        entropy = mixture.entropies(rig.model, response.tokens_S.tolist())[
            response.actions[0][0] - 1 :
        ]
        assert (entropy - torch.tensor(response.entropies_T)).abs().max() < TOLERANCE


def test_rows_of_an_agent_s_conversation_have_no_hole(alone: Rig, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    asked = GroupRequest("what?", "", 3, Sampling(1.0, 1.0, None, 96), (5,))
    responses = ray.get(
        alone.engine.episodes.remote(str(tmp_path / "agent.py"), asked), timeout=PATIENCE_S
    )
    for response in responses:
        assert len(response.actions) == 3 and response.actions[-1][1] == len(response.tokens_S)
        whole(alone, response)
    assert len({tuple(response.tokens_S) for response in responses}) == 3


AGENT = """
from openai import OpenAI

def run_agent(prompt, label, base_url):
    with OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        for _ in range(3):
            prompt += client.completions.create(model="any", prompt=prompt, max_tokens=8).choices[0].text
            prompt += " is 12 so?"
    return 1.0
"""
