"""Drafts do not change what the engines sample, tell, or load."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any
from zlib import crc32

import pytest
import ray
import torch

from openrlhf_ext.rollout import launch
from tests.patience import PATIENCE_S
from tests.rollout import tiny
from tests.rollout.draft_head import save_head
from tests.rollout.test_engine import Rig, start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

VOCAB = 6
ALL_PAIRS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 2, 0, 3, 0, 4, 0, 5, 1, 0, 1, 3, 1, 4, 1, 5, 2]
"""After them many ends of a text were there before, and something is drafted."""
SAMPLES, AT_A_TIME = 20_000, 1000
"""tests/patches/test_vllm_drafts.py draws 100,000, from vLLM's sampler alone."""


def head_sums(worker: Any) -> dict[str, int]:
    """What vLLM keeps through a sleep at level 2, by name."""
    kept = worker._get_sleep_parameters(worker.model_runner.model)
    patterns = worker.model_config.sleep_preserve_parameter_names
    assert patterns == ["draft.*"]
    own = {name: one for name, one in kept.items() if name.startswith("draft.")}
    return {name: crc32(one.detach().numpy().tobytes()) for name, one in own.items()}


class DraftingEngine(tiny.SabotagedEngine):
    async def head(self) -> dict[str, int]:
        (sums,) = await self.llm.collective_rpc(head_sums)
        return sums

    async def sampled(self, prompt: list[int], count: int, **params: Any) -> Counter:
        """How often the completions of a prompt were what."""
        from vllm import SamplingParams

        asked = SamplingParams(n=count, ignore_eos=True, detokenize=False, **params)
        output = await self.generate(prompt, asked)
        return Counter(tuple(completion.token_ids) for completion in output.outputs)


@pytest.fixture(scope="module")
def rigs(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rig]:
    folder = tmp_path_factory.mktemp("drafts")
    tiny.save_checkpoint(folder / "model", tied=False, vocab=VOCAB)
    save_head(folder / "head", tiny.random_model(0, tied=False, vocab=VOCAB).config)
    methods = {"ngram": {}, "eagle3": {"path": str(folder / "head")}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RolloutEngine", DraftingEngine)
        started = {
            method: start(
                folder / "model",
                max_num_seqs=AT_A_TIME,
                tells_entropies=True,
                speculative={"method": method, "num_tokens": 3, **more},
            )
            for method, more in methods.items()
        }
    launch.wait_until_ready(list(started.values()), 2 * PATIENCE_S)
    return {method: Rig(engine, tied=False, vocab=VOCAB) for method, engine in started.items()}


def expected(model: Any, prompt: list[int], length: int, temperature: float) -> dict[tuple, float]:
    """Probabilities of all continuations, by transformers."""
    texts = [*product(range(VOCAB), repeat=length)]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + list(text) for text in texts])).logits
    logprobs_NTV = (logits[:, len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
    sums_N = logprobs_NTV.gather(2, torch.tensor(texts)[..., None]).sum((1, 2))
    return dict(zip(texts, sums_N.exp().tolist(), strict=True))


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_three_tokens_have_the_exact_distribution(rigs: dict[str, Rig], method: str) -> None:
    rig, temperature = rigs[method], 0.8
    ray.get(rig.engine.rollout_stats.remote())
    asked = {"max_tokens": 3, "temperature": temperature}
    counts: Counter = sum(
        ray.get(
            [
                rig.engine.sampled.remote(ALL_PAIRS, AT_A_TIME, **asked)
                for _ in range(SAMPLES // AT_A_TIME)
            ]
        ),
        Counter(),
    )
    stats = ray.get(rig.engine.rollout_stats.remote())
    assert stats["drafts"] > SAMPLES / 2 and stats["accepted"] > SAMPLES / 20
    exact = expected(rig.model, ALL_PAIRS, 3, temperature)
    large = {text: SAMPLES * share for text, share in exact.items() if SAMPLES * share >= 10}
    differences = [(counts[text] - mean) ** 2 / mean for text, mean in large.items()]
    freedom = len(large)
    assert freedom > 50 and sum(differences) < freedom + 5 * (2 * freedom) ** 0.5
    rare = SAMPLES - sum(large.values())
    assert abs(SAMPLES - sum(counts[text] for text in large) - rare) < 5 * (rare + 10) ** 0.5


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_logprobs_entropies_and_a_probe_are_the_models_through_updates(
    rigs: dict[str, Rig], method: str
) -> None:
    rig = rigs[method]
    head = ray.get(rig.engine.head.remote())
    for seed in (1, 2):
        ray.get(rig.engine.discard_weights.remote())  # loses the model's, as on a GPU
        ray.get(rig.engine.wake_weights.remote())
        rig.send(seed)
        ray.get(rig.engine.wake_up.remote(["kv_cache"]))
        prompts = [[*ALL_PAIRS, last] for last in range(VOCAB)]
        asked = {"max_tokens": 100, "temperature": 0.5}
        flying = rig.begin(prompts, **asked)
        assert rig.check() < 1e-4  # beside them
        for prompt, output in zip(prompts, ray.get(flying, timeout=PATIENCE_S), strict=True):
            (completion,) = output.outputs
            tokens = list(completion.token_ids)
            told = [at[token] for token, at in zip(tokens, completion.logprobs, strict=True)]
            ours = tiny.logprobs(rig.model, prompt + tokens, 0.5)[-len(tokens) :]
            assert torch.allclose(torch.tensor([each.logprob for each in told]), ours, atol=1e-4)
            with torch.no_grad():
                logits = rig.model(torch.tensor([prompt + tokens])).logits[0, -len(tokens) - 1 : -1]
            entropies = torch.distributions.Categorical(logits=logits / 0.5).entropy()
            assert torch.allclose(torch.tensor([each.rank for each in told]), entropies, atol=1e-4)
    assert ray.get(rig.engine.rollout_stats.remote())["accepted"] > 0
    # the head is what it was: no embedding, which it shares, and no update has it
    assert ray.get(rig.engine.head.remote()) == head
    assert ("draft.model.fc.weight" in head) == (method == "eagle3")
    assert not any("embed_tokens" in name for name in head)
