"""A real vLLM engine under Ray on CPU: one start, many claims."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor

from openrlhf_ext.options.sections import Vllm
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.probe import WeightSyncMismatch, check_sync
from openrlhf_ext.rollout.response import (
    EngineStartError,
    GenerationTimeout,
    GroupRequest,
    InvalidWeights,
    Sampling,
)
from openrlhf_ext.rollout.sync import find_transport
from openrlhf_ext.rollout.sync.base import EngineFailed
from openrlhf_ext.rollout.sync.sender import SendReport, WeightSender
from tests.patience import PATIENCE_S, SOONER_S, until
from tests.rollout import tiny
from tests.rollout.updates import fill_with, halted_in_flight, plan_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CACHE_BLOCK = 128
MAX_REQUESTS = 1100  # more than Ray lets an asynchronous actor work on by itself
PROBE = random.Random(0).choices(range(tiny.VOCAB), k=CACHE_BLOCK + 20)
TOLERANCE = 1e-4


class Rig:
    """The engine, a sender, and the model whose weights were sent last."""

    def __init__(self, engine: Any, tied: bool, vocab: int = tiny.VOCAB) -> None:
        self.engine = engine
        self.tied, self.vocab = tied, vocab
        self.model = tiny.random_model(seed=0, tied=tied, vocab=vocab)
        # Buckets smaller than a layer: vLLM must be able to keep the first tensors of a layer until
        # it has the rest.
        plan = plan_of(dict(self.tensors()), 20_000)
        staging = find_transport("gloo").staging(plan, [[0]], PATIENCE_S)
        self.sender = WeightSender("gloo", plan, staging, [engine], 1, PATIENCE_S)
        self.sender.connect()
        self.version = 0

    def tensors(self) -> list[tuple[str, Tensor]]:
        shared = {"lm_head.weight"} if self.tied else set()
        return [
            (name, tensor) for name, tensor in self.model.state_dict().items() if name not in shared
        ]

    def send(self, seed: int, change: Any = None) -> SendReport:
        self.model = tiny.random_model(seed, self.tied, self.vocab)
        self.version += 1
        tensors: Iterable[tuple[str, Tensor]] = self.tensors()
        if not self.sender.connected:  # after an update that failed
            self.sender.connect()
        return self.sender.send(
            fill_with(dict(tensors if change is None else change(tensors))), self.version
        )

    def check(self) -> float:
        probe = [token % self.vocab for token in PROBE]

        def score(length: int) -> list[list[float]]:
            return [ray.get(self.engine.probe_logprobs.remote(probe[:length]))]

        ours = tiny.logprobs(self.model, probe)
        return check_sync(ours, score(len(PROBE)), TOLERANCE, self.version, score=score)

    def generate(self, prompts: list[list[int]], **params: Any) -> list[Any]:
        return ray.get(self.begin(prompts, **params), timeout=PATIENCE_S)

    def begin(self, prompts: list[list[int]], **params: Any) -> list[Any]:
        from vllm import SamplingParams

        asked = SamplingParams(
            **{"max_tokens": 12, "temperature": 1.0, "ignore_eos": True, "logprobs": 1, **params}
        )
        return [self.engine.generate.remote(prompt, asked) for prompt in prompts]


def start(model_path: Path, **options: Any) -> Any:
    own = {name: options.pop(name) for name in list(options) if name in Vllm.model_fields}
    usual = {
        "dtype": "fp32",
        "enable_prefix_caching": True,
        "kv_cache_mib": 32,
        "max_requests": MAX_REQUESTS,
    }
    engine = Vllm(**{**usual, **own})
    defaults = {
        "seed": 3,
        "max_model_len": 256,
        "request_timeout_s": PATIENCE_S,
        "use_gpu": False,
        "executor_factory": partial(tiny.CountingExecutor, 0.0),
    }
    return launch.create_rollout_engines(str(model_path), engine, **{**defaults, **options})[0]


@pytest.fixture(scope="module")
def engines(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One for most tests, one with tied embeddings, and one that cannot start: started together to
    save time."""
    folder = tmp_path_factory.mktemp("tiny")
    for tied in (False, True):
        tiny.save_checkpoint(folder / str(tied), tied)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "RolloutEngine", tiny.SabotagedEngine)
        good = start(folder / "False", executor_factory=partial(tiny.CountingExecutor, 0.2))
        tied = start(folder / "True", max_num_seqs=2, max_num_batched_tokens=300)
        bad = start(folder / "False", max_model_len=100_000)
    launch.wait_until_ready([good, tied], PATIENCE_S)
    return {"good": good, "tied": tied, "bad": bad}


@pytest.fixture(scope="module")
def rig(engines: dict[str, Any]) -> Rig:
    return Rig(engines["good"], tied=False)


def sampled_logprobs(output: Any) -> list[float]:
    completion = output.outputs[0]
    return [
        entry[token].logprob
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def test_an_engine_that_cannot_start_gives_its_own_error(engines: dict[str, Any]) -> None:
    with pytest.raises(
        EngineStartError, match="rollout engine 1 did not start(.|\n)*max_model_len"
    ):
        launch.wait_until_ready([engines["good"], engines["bad"]], PATIENCE_S)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"max_num_batched_tokens": 255},
            ValueError,
            "vllm.max_num_batched_tokens must be at least data.max_len.*255",
        ),
        (
            {"num_engines": 99},
            EngineStartError,
            "99 rollout engines need 99 CPUs, the Ray cluster has 8",
        ),
    ],
)
def test_options_that_do_not_fit_the_machine_are_refused(
    ray_session: None, tmp_path: Path, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        start(tmp_path, **options)


def test_what_is_not_asked_for_of_a_step_gives_way_to_what_is() -> None:
    def limits(
        use_gpu: bool, sequences: int | None = None, tokens: int | None = None
    ) -> tuple[int, ...]:
        options = Vllm(max_num_seqs=sequences, max_num_batched_tokens=tokens)
        return tuple(launch.batch_limits(use_gpu, options, max_model_len=5000).values())

    assert limits(True) == (1024, 8192) and limits(False) == (256, 5000)
    assert limits(True, sequences=9000) == (9000, 9000) and limits(True, tokens=512) == (512, 512)
    assert limits(False, sequences=6000) == (6000, 6000) and limits(False, 64, 6000) == (64, 6000)
    graphs = Vllm(max_cudagraph_capture_size=1024)
    assert launch.batch_limits(True, graphs, 5000)["max_cudagraph_capture_size"] == 1024
    assert launch.batch_limits(False, graphs, 5000).keys() == {
        "max_num_seqs",
        "max_num_batched_tokens",
    }, "no graphs"


def test_the_engine_tells_where_it_runs(rig: Rig) -> None:
    info = ray.get(rig.engine.process_info.remote())
    os.kill(info["pid"], 0)
    assert info["logs"]


def test_questions_are_answered_beside_all_requests_that_are_allowed(rig: Rig) -> None:
    from vllm import SamplingParams

    ray.get(rig.engine.pause_generation.remote(), timeout=PATIENCE_S)
    asked = SamplingParams(max_tokens=1)
    requests = [rig.engine.generate.remote(PROBE[:4], asked) for _ in range(MAX_REQUESTS)]
    assert ray.get(rig.engine.weight_version.remote(), timeout=SOONER_S) == 0
    assert not ray.wait(requests, timeout=0)[0]
    ray.get(rig.engine.resume_generation.remote(), timeout=SOONER_S)
    assert len(ray.get(requests, timeout=PATIENCE_S)) == MAX_REQUESTS


def test_weights_from_disk_score_as_in_transformers(rig: Rig) -> None:
    assert rig.check() < TOLERANCE
    assert ray.get(rig.engine.weight_version.remote()) == 0


def test_after_a_sync_the_engine_scores_and_samples_as_the_policy(rig: Rig) -> None:
    for seed in (1, 2):
        report = rig.send(seed)
        assert 0 < report.load_s < report.seconds < SOONER_S
        assert rig.check() < TOLERANCE
        assert ray.get(rig.engine.weight_version.remote()) == rig.version
    prompts = [PROBE[:n] for n in (5, 40, 140)]
    for prompt, output in zip(prompts, rig.generate(prompts, temperature=0.7), strict=True):
        tokens = prompt + list(output.outputs[0].token_ids)
        expected = tiny.logprobs(rig.model, tokens, temperature=0.7)[len(prompt) - 1 :]
        assert (expected - torch.tensor(sampled_logprobs(output))).abs().max() < TOLERANCE


def test_tied_embeddings_are_replaced_in_the_output_layer_too(engines: dict[str, Any]) -> None:
    rig = Rig(engines["tied"], tied=True)
    assert rig.check() < TOLERANCE
    for seed in (1, 2):
        rig.send(seed)
        assert rig.check() < TOLERANCE
    rig.sender.close()


def test_after_an_update_the_probe_goes_first_and_requests_as_they_came(
    engines: dict[str, Any],
) -> None:
    rig = Rig(engines["tied"], tied=True)
    assert ray.get(rig.engine.batch_limits.remote()) == (2, 300)
    rig.send(seed=3)
    rig.check()
    ray.get(rig.engine.note_events.remote())
    lengths = list(range(150, 158))
    ray.get(rig.engine.pause_generation.remote())
    running = rig.engine.generate_all.remote(PROBE[:5], lengths)
    until(
        lambda: ray.get(rig.engine.get_num_unfinished_requests.remote()) == len(lengths),
        "all have arrived",
    )
    ray.get(rig.engine.resume_generation.remote())
    rig.send(seed=4)
    ray.get(running, timeout=PATIENCE_S)
    events = ray.get(rig.engine.note_events.remote())
    assert [event for event in events if isinstance(event, int)] == lengths
    assert events[events.index("update 2") + 1] == "probe" != events[-1], events
    assert rig.check() < TOLERANCE
    rig.sender.close()


def test_keys_and_values_of_old_weights_in_the_prefix_cache_are_caught(rig: Rig) -> None:
    ray.get(rig.engine.sabotage.remote(forget_to_reset=True))
    rig.check()  # puts the probe's blocks into the cache
    rig.send(seed=3)
    with pytest.raises(WeightSyncMismatch, match=f"worst at position {len(PROBE) - 2}: policy"):
        rig.check()
    ray.get(rig.engine.sabotage.remote(forget_to_reset=False))
    rig.send(seed=4)
    assert rig.check() < TOLERANCE


def test_a_wrong_value_in_one_tensor_is_caught(rig: Rig) -> None:
    def corrupt(tensors: list[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor + 0.05 if name == "model.layers.1.mlp.up_proj.weight" else tensor

    rig.send(5, corrupt)
    with pytest.raises(WeightSyncMismatch, match="policy -\\d+.*, engine -\\d+"):
        rig.check()
    rig.send(seed=5)
    assert rig.check() < TOLERANCE


def test_an_incomplete_update_makes_the_engine_refuse_until_the_next_one(rig: Rig) -> None:
    missing = "model.layers.1.self_attn.k_proj.bias"
    with pytest.raises(KeyError, match=missing):
        rig.send(6, lambda tensors: [item for item in tensors if item[0] != missing])
    with pytest.raises(
        InvalidWeights, match="update to version \\d+ failed(.|\n)*the sender gave up"
    ):
        ray.get(rig.engine.probe_logprobs.remote(PROBE))
    with pytest.raises(InvalidWeights):
        rig.generate([PROBE[:5]])
    rig.send(seed=7)
    assert rig.check() < TOLERANCE


def test_weights_that_were_given_up_for_an_update_are_not_sampled_from_until_it_has_come(
    rig: Rig,
) -> None:
    ray.get(rig.engine.wake_weights.remote(), timeout=PATIENCE_S)
    for refused in (
        lambda: ray.get(rig.engine.probe_logprobs.remote(PROBE)),
        lambda: rig.generate([PROBE[:5]]),
    ):
        with pytest.raises(
            InvalidWeights, match="its weights were given up for an update, which has not come"
        ):
            refused()
    rig.send(seed=8)
    ray.get(rig.engine.wake_up.remote(), timeout=PATIENCE_S)
    assert rig.check() < TOLERANCE
    assert len(rig.generate([PROBE[:5]])) == 1


def test_samples_do_not_depend_on_the_order_of_prompts(rig: Rig) -> None:
    prompts = ["what is 12 times 31?", "12", "Answer: 372", "31 + 31", "is", "372?"]

    def sample(seed: int, order: Iterable[int]) -> dict[int, list[list[int]]]:
        order = list(order)
        groups = [
            rig.engine.generate_group.remote(group_request(prompts[i], 3, 12, seed + i))
            for i in order
        ]
        return dict(zip(order, ray.get(groups, timeout=PATIENCE_S), strict=True))

    first = sample(8, range(len(prompts)))
    assert first == sample(8, [4, 0, 5, 2, 1, 3])
    assert all(len({tuple(tokens) for tokens in group}) == 3 for group in first.values())
    assert first != sample(99, range(len(prompts)))


def group_request(
    prompt: str, samples: int, tokens: int | None, seed: int | None = None
) -> GroupRequest:
    return GroupRequest(
        prompt, "", samples, Sampling(1.0, 1.0, tokens, 64), None if seed is None else (seed,)
    )


def test_groups_come_from_the_executor_and_its_time_is_told_apart(rig: Rig) -> None:
    started = time.monotonic()
    ray.get(rig.engine.rollout_stats.remote())
    completions = ray.get(rig.engine.generate_group.remote(group_request("what?", 4, 8)))
    stats = ray.get(rig.engine.rollout_stats.remote())
    elapsed = time.monotonic() - started
    assert [len(tokens) for tokens in completions] == [8] * 4
    assert stats["generated_tokens"] == 32 and stats["generated_sequences"] == 4
    assert stats["reward_failures"] == ["no grade"]
    assert (
        0 < stats["generation_s"] < elapsed - stats["exposed_grading_s"]
        and stats["exposed_grading_s"] > 0.15
    )
    assert ray.get(rig.engine.rollout_stats.remote())["generated_tokens"] == 0


AGENT = """
from openai import OpenAI

def run_agent(prompt, label, base_url):
    with OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
        said = client.completions.create(model="any", prompt=prompt, max_tokens=8).choices[0].text
        client.completions.create(model="any", prompt=prompt + said + " is 12 so?", max_tokens=8)
    return 1.0
"""


def test_an_agent_s_conversation_is_what_was_sampled_of_the_policy(
    rig: Rig, tmp_path: Path
) -> None:
    """The model is random: what it says does not become the same tokens when its text is tokenized
    again."""
    (tmp_path / "agent.py").write_text(AGENT)
    asked = group_request("what?", 6, None, seed=5)
    responses = ray.get(
        rig.engine.episodes.remote(str(tmp_path / "agent.py"), asked), timeout=PATIENCE_S
    )
    for response in responses:
        first, second = response.actions
        assert (
            first[1] - first[0] <= 8
            and second[1] == len(response.tokens_S)
            and response.reward == 1.0
        )
        assert response.versions == ((rig.version, *first), (rig.version, *second))
        expected = tiny.logprobs(rig.model, response.tokens_S.tolist())
        expected = torch.cat([expected[start - 1 : stop - 1] for start, stop in response.actions])
        assert (expected - torch.tensor(response.logprobs_T)).abs().max() < TOLERANCE
    assert len({tuple(response.tokens_S) for response in responses}) == 6, (
        "each sample has a seed of its own"
    )


def test_flat_logprobs_are_those_of_the_sampled_tokens(rig: Rig) -> None:
    flat, usual = (
        rig.generate([PROBE[:9]], seed=7, **more)[0].outputs[0]
        for more in ({"logprobs": 0, "flat_logprobs": True}, {"logprobs": 1})
    )
    assert flat.token_ids == usual.token_ids
    assert flat.logprobs.logprobs == [
        e[t].logprob for t, e in zip(usual.token_ids, usual.logprobs, strict=True)
    ]


def test_a_stop_string_ends_a_completion_with_a_log_prob_for_each_of_its_tokens(rig: Rig) -> None:
    """vLLM finds it outside of its scheduler, which then has not kept the log-probs
    (rollout/scheduler.py)."""
    whole = rig.generate([PROBE[:9]], seed=3, logprobs=1, detokenize=True)[0]
    stop = whole.outputs[0].text[len(whole.outputs[0].text) // 2]
    cut = rig.generate([PROBE[:9]], seed=3, logprobs=1, detokenize=True, stop=[stop])[0]
    (completion,) = cut.outputs
    assert completion.stop_reason == stop and 0 < len(completion.token_ids) < 12
    assert sampled_logprobs(cut) == sampled_logprobs(whole)[: len(completion.token_ids)]


def test_a_request_that_outlives_its_deadline_says_what_it_waited_for(rig: Rig) -> None:
    ray.get(
        [rig.engine.pause_generation.remote(), rig.engine.sabotage.remote(request_timeout_s=0.5)]
    )
    with pytest.raises(
        GenerationTimeout, match="within 0.5 s; 1 requests were waiting.*generation is paused"
    ):
        rig.generate([PROBE[:5]])
    ray.get([rig.engine.resume_generation.remote(), rig.engine.sabotage.remote()])
    assert len(rig.generate([PROBE[:5]])[0].outputs[0].token_ids) == 12
    assert ray.get(rig.engine.get_num_unfinished_requests.remote()) == 0


def test_requests_in_flight_go_on_with_the_new_weights_and_say_which_tokens_are_whose(
    rig: Rig,
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=190, ignore_eos=True, temperature=1.0, logprobs=1)
    zeros = SamplingParams(
        max_tokens=190, ignore_eos=True, temperature=1.0, logprobs=1, allowed_token_ids=[0]
    )
    models = {rig.version: rig.model}
    asked = [params] * 7 + [zeros]
    *running, only_zeros = halted_in_flight(
        rig.engine, lambda: [rig.engine.generate.remote(PROBE[:60], each) for each in asked]
    )
    with pytest.raises(KeyError):
        rig.send(10, lambda tensors: tensors[:-1])
    sampled = ray.get(rig.engine.sampled_tokens.remote())
    time.sleep(0.1)
    assert ray.get(rig.engine.sampled_tokens.remote()) == sampled, (
        "sampled with a mixture of weights"
    )
    rig.send(seed=10)
    models[rig.version] = rig.model
    assert rig.check() < TOLERANCE
    outputs = ray.get(running, timeout=PATIENCE_S)
    for completion in (output.outputs[0] for output in outputs):
        assert completion.weight_versions[0][1] == 0 and completion.weight_versions[-1][2] == 190
        tokens = PROBE[:60] + list(completion.token_ids)
        for version, start, end in completion.weight_versions:
            expected = tiny.logprobs(models[version], tokens)[59:][start:end]
            sampled = [
                e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)
            ][start:end]
            assert (expected - torch.tensor(sampled)).abs().max() < TOLERANCE, (version, start, end)
    assert all(len(output.outputs[0].weight_versions) == 2 for output in outputs)
    completion = ray.get(only_zeros, timeout=PATIENCE_S).outputs[0]
    assert len(completion.weight_versions) == 2, "not beside the probe"
    assert {entry[0].logprob for entry in completion.logprobs} == {0.0}, (
        "the probe's padding (token 0) hid a token"
    )


def test_a_killed_engine_surfaces_at_once_in_generation_and_in_weight_sync(rig: Rig) -> None:
    from vllm import SamplingParams

    pid = ray.get(rig.engine.process_info.remote())["pid"]
    running = rig.engine.generate.remote(PROBE[:5], SamplingParams(max_tokens=200, ignore_eos=True))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):  # that it died, or that it is not available
        ray.get(running, timeout=PATIENCE_S)
    with pytest.raises(EngineFailed, match="rollout engine 0 failed while receiving weights"):
        rig.send(seed=11)
