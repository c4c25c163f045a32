"""A policy rank and an engine in its own process, as on GPUs, of a bf16 Llama with logits as wide
as a real one's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import SamplingParams

from openrlhf_ext.config import RunConfig
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.options.sections import Actor, Adam, Train, Vllm, WeightSync
from openrlhf_ext.ranks.publishing import SyncSettings, WeightPublisher
from openrlhf_ext.rollout import launch, probe
from openrlhf_ext.rollout.probe import end_of_probe
from openrlhf_ext.rollout.response import EngineDied
from openrlhf_ext.rollout.sync.plan import WeightSyncMismatch
from tests.cluster import start_local_ray
from tests.megatron.parity import WeightedLogprob
from tests.patience import PATIENCE_S
from tests.rollout import tiny
from tests.rollout.updates import halted_in_flight

VOCAB = 49_152
TOLERANCE = RunConfig(megatron={"param_dtype": "bf16"}).probe_tolerance
PROMPT = list(range(100, 150))


def save_checkpoint(path: Path) -> None:
    """Random, with the head scaled so that a token drawn at random has a log-prob of about -17."""
    tiny.save_checkpoint(path, tied=False)  # its tokenizer
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.45)
    model.save_pretrained(path)


@dataclass
class Wide:
    """The policy, its publisher, the engine."""

    policy: MegatronPolicy
    publisher: WeightPublisher
    engine: Any
    version: int = 0

    @classmethod
    def start(cls, path: str) -> Wide:
        start_local_ray()
        arguments = {**launch.cpu_engine_args(Vllm(kv_cache_mib=32)), "in_process": False}
        own_process = patch.object(launch, "cpu_engine_args", lambda *_: arguments)
        with own_process, patch.object(launch, "RolloutEngine", tiny.SabotagedEngine):
            engine = launch.create_rollout_engines(
                path,
                Vllm(dtype="bf16", enable_prefix_caching=True, kv_cache_mib=32, max_requests=16),
                max_model_len=256,
                seed=3,
                request_timeout_s=PATIENCE_S,
                use_gpu=False,
                executor_factory=partial(tiny.CountingExecutor, 0.0),
            )[0]
        layout = ParallelLayout(1, 1, 1, 1)
        initialize_distributed(layout, PATIENCE_S, 0)
        optimizer = Actor(adam=Adam(lr=1e-3), lr_scheduler="constant")
        one_pass = Train(micro_batch_size=2)  # both of its sequences
        policy = MegatronPolicy(
            ModelSettings(path, layout, train=one_pass, optimizer=optimizer, updates=1000)
        )
        launch.wait_until_ready([engine], PATIENCE_S)
        tokens, logprobs = ray.get(engine.continuation.remote(PROMPT, 110, 0), timeout=PATIENCE_S)
        text = tuple(PROMPT + tokens[: end_of_probe(logprobs)])
        publisher = WeightPublisher(
            policy,
            SyncSettings(
                "gloo",
                1,
                WeightSync(bucket_mib=4, timeout_s=PATIENCE_S),
                TOLERANCE,
                text,
                "adapter",
                "bf16",
            ),
            [engine],
        )
        publisher.connect()
        return cls(policy, publisher, engine)

    def update(self, batch: SequenceBatch, weights_N: torch.Tensor) -> float:
        """A step of training, a sync, the proof."""
        shaped = WeightedLogprob(weights_N, batch.responses)
        self.policy.train_step(batch, shaped, shaped)
        return self.send()

    def send(self) -> float:
        """A sync, the proof."""
        self.version += 1
        self.publisher.publish(self.version, trained=True)
        return self.publisher.prove(self.version)


def run(path: str, updates: int) -> dict[str, Any]:
    """What the test asserts on, from one start."""
    wide = Wide.start(path)
    found: dict[str, Any] = {"gauges": [wide.publisher.prove(0)]}
    # half of what the model says itself becomes likelier, half less so, as advantages have it
    texts = [ray.get(wide.engine.continuation.remote(PROMPT, 16, seed))[0] for seed in (1, 2)]
    batch = sequence_batch(
        [torch.tensor(PROMPT + text).numpy() for text in texts], [[(50, 66)]] * 2
    )
    weights_N = torch.tensor([1.0, -0.2]).repeat_interleave(16) / 32
    found["random"] = float(wide.policy.logprobs(random_row(), 1.0).logprobs_N.mean())
    found["entropy"] = [float(wide.policy.logprobs(batch, 1.0).entropies_N.mean())]
    with patch.object(probe.logger, "warning") as said:
        found["gauges"] += [wide.update(batch, weights_N) for _ in range(updates)]
    found["warned"] = said.call_count
    found["entropy"].append(float(wide.policy.logprobs(batch, 1.0).entropies_N.mean()))
    with patch.object(
        wide.policy, "logprobs", partial(at_another_temperature, wide.policy.logprobs)
    ):
        found["temperature"] = alarm(lambda: wide.publisher.prove(wide.version))
    ray.get(wide.engine.sabotage.remote(forget_to_reset=True))
    # The values of old keys would hardly show after one step. Large weights, drawn by a seed, show
    # them on every processor.
    torch.manual_seed(1)
    for parameter in (
        p for chunk in wide.policy.chunks for p in chunk.decoder.parameters() if p.dim() == 2
    ):
        parameter.data.normal_(std=0.3)
    found["cache"] = alarm(lambda: wide.send())
    ray.get(wide.engine.sabotage.remote())
    found["proved again"] = wide.update(batch, weights_N) < TOLERANCE
    return found | through_a_sync_and_a_kill(wide, batch, weights_N)


def random_row() -> SequenceBatch:
    torch.manual_seed(0)
    return sequence_batch([torch.randint(0, VOCAB, (100,)).numpy()], [[(1, 100)]])


def alarm(action: Callable[[], object]) -> str:
    """The proof's words if it ends the run, else nothing."""
    try:
        action()
    except WeightSyncMismatch as error:
        return str(error)
    return ""


def at_another_temperature(logprobs: Any, batch: SequenceBatch, temperature: float) -> Any:
    """What an engine that forgets the temperature looks like from the policy's side."""
    return logprobs(batch, 0.8)


def through_a_sync_and_a_kill(
    wide: Wide, batch: SequenceBatch, weights_N: torch.Tensor
) -> dict[str, Any]:
    """Requests of an engine in a process of its own go on through a sync; they end with an error
    when it is killed."""

    def in_flight(requests: int) -> list[Any]:
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=1.0, logprobs=1)
        return halted_in_flight(
            wide.engine,
            lambda: [wide.engine.generate.remote(PROMPT, params) for _ in range(requests)],
        )

    running = in_flight(4)
    wide.update(batch, weights_N)
    outputs = ray.get(running, timeout=PATIENCE_S)
    spans = [output.outputs[0].weight_versions for output in outputs]
    info = ray.get(wide.engine.process_info.remote(), timeout=PATIENCE_S)
    (last,) = in_flight(1)
    children = psutil.Process(info["pid"]).children(recursive=True)
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    try:
        ray.get(last, timeout=PATIENCE_S)
        died = "nothing was raised"
    except ray.exceptions.RayTaskError as error:
        died = (
            str(error.cause) if isinstance(error.cause, EngineDied) else f"another error: {error}"
        )
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    return {"spans": spans, "lengths": lengths, "died": died, "own": len(children)}
