"""Our loop collects what OpenRLHF's collects, on the same engines; and it does so while they die."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray

from openrlhf_ext.compat import Experience, SamplesGenerator
from openrlhf_ext.controller.engine_recovery import EngineGuard, RecoveryLimits
from openrlhf_ext.controller.samples import RecoveringSamplesGenerator
from openrlhf_ext.rollout.fleet import EngineFleet
from tests.cluster import start_local_ray
from tests.controller.fake_engines import ScoringEngine
from tests.patience import PATIENCE_S

ARGS = SimpleNamespace(
    rollout=SimpleNamespace(batch_size=4, n_samples_per_prompt=2, vllm_generate_batch_size=None),
    algo=SimpleNamespace(
        dynamic_filtering_enable=True, dynamic_filtering_range=(0.0, 1.0),
        advantage=SimpleNamespace(is_correction_level="token"),
    ),
    vllm=SimpleNamespace(enable_sleep=False),
)  # fmt: skip
KWARGS = {"max_len": 16, "max_new_tokens": 4}


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    start_local_ray()
    with pytest.MonkeyPatch.context() as patch:  # the fakes need not import vLLM to read their arguments
        patch.setattr(sys.modules[SamplesGenerator.__module__], "SamplingParams", dict)
        yield
    ray.shutdown()


def prompts(count: int) -> list[tuple]:
    """What the data loader yields."""
    return [(["set"], [str(i)], [f"label {i}"], [None]) for i in range(count)]


def ours(*dies_at: str) -> RecoveringSamplesGenerator:
    lives = [[death, "never"] for death in dies_at]
    fleet = EngineFleet(lambda index: ScoringEngine.remote(lives[index].pop(0)), len(lives))
    guard = EngineGuard(fleet, None, RecoveryLimits(3, PATIENCE_S, PATIENCE_S, PATIENCE_S))
    return RecoveringSamplesGenerator(SimpleNamespace(args=ARGS), prompts(14), None, None, fleet, guard=guard)


def theirs() -> SamplesGenerator:
    engines = [ScoringEngine.remote("never") for _ in range(2)]
    return SamplesGenerator(SimpleNamespace(args=ARGS), prompts(14), None, None, engines)


def everything(generator: SamplesGenerator) -> list[tuple]:
    """All batches of an episode: the groups (in any order), the pass rate, the prompts drawn, whether it has ended."""
    batches, is_exhausted = [], False
    while not is_exhausted:
        samples, rate, drawn, is_exhausted = generator.generate_samples(**KWARGS)
        batches.append((sorted(map(describe, samples)), rate, drawn, is_exhausted))
    return batches


def describe(sample: Experience) -> tuple:
    tensors = (sample.sequences, sample.action_mask, sample.rollout_log_probs, sample.rewards)
    return (sample.prompts[0], sample.labels[0], *(tuple(tensor.flatten().tolist()) for tensor in tensors))


def test_groups_filtering_and_refills_are_those_of_openrlhf() -> None:
    assert everything(ours("never", "never")) == everything(theirs())


def test_they_are_the_same_when_engines_die_at_the_first_prompt_at_a_refill_and_while_being_asked() -> None:
    generator = ours("0", "7")
    expected = everything(theirs())
    os.kill(ray.get(generator.guard.engines[1].process_info.remote())["pid"], 9)
    assert everything(generator) == expected
    assert generator.guard.restarts >= 2
