"""Seconds and memory of what the driver does with one batch of rollouts, at the size of a real run.

    python benchmarks/scale.py --replay 384 --output benchmarks/results/scale_cpu.json       # a
    whole 32B step python benchmarks/scale.py --algorithm clip_cov --sequences 4096

No model and no Ray: responses are synthetic, and what travels between processes is pickled and
unpickled here, the way Ray does it (protocol 5; buffers out of band, copied once). Stages, in the
order of a step:

  receive      groups of graded responses, as the engines send them
  batch        responses into one batch of sequences
  send         every data-parallel rank's rows: `bytes` go out
  collect      log-probs and entropies of all ranks: `bytes` come back, merged
  rollout      the algorithms' view of the batch
  shape        advantages and weights (`Algorithm.shape`)
  metrics      what the records say of the batch
  shards       every rank's shard of each mini-batch
  ship         the shards: `bytes` go out
  plan         all rows dealt to the ranks, and cut into micro-batches by one of them, for log-probs
  and for training
  checkpoint   with --replay only: the groups in a checkpoint, if all still waited for training

Each stage has its seconds, the growth of the resident peak while it runs (`peak_bytes`), and what
it leaves behind (`kept_bytes`); `peak_bytes` of the whole is the resident peak of the process from
the first stage on, the received responses and the interpreter included, of what is sent the piece
that is being copied. Everything is measured twice, in a process each: for a quarter of the
sequences and for all; `growth` is the ratio of the seconds, 4 if they are linear. Lengths are
log-normal, cut at the longest response: a few long ones among many short ones. Completions of a
group have one prompt.

--replay BYTES (of the experts of a token: 384 for 48 layers and 8 experts) adds `replay`, the entry
of a mixture's run with train.routing_replay rollout. It is measured on --replay_sequences with a
Ray of this machine: the driver's own `GroupRequests` ask an actor that stands for an engine, and
hold references to the experts, which stay in Ray's store. `without` is the same without experts, on
Ray too. `growth` is the driver's resident peak of the step with them by that without, minus 1. The
step does not include `checkpoint`, in which experts do pass through the driver. None wait with
train.max_staleness 0.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import ray.cloudpickle as pickle
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.driver.engines import EngineSupervisor
from openrlhf_ext.driver.experience import (
    responses_of,
    rollout_batch,
    routed_by_engines,
    sequences_of,
    training_shards,
)
from openrlhf_ext.driver.gauges import (
    advantage_gauges,
    batch_metrics,
    expected_of_first_update,
    reward_metrics,
    staleness_metrics,
)
from openrlhf_ext.driver.rollouts import Group, GroupRequests, Prompt, plain_groups
from openrlhf_ext.driver.scoring import deal, scores_in_order
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch
from openrlhf_ext.megatron.step.dealing import (
    RowCosts,
    Sizes,
    deal_rows,
    group_chunks,
    plan_micro_batches,
)
from openrlhf_ext.rollout.response import GroupRequest, Response, Sampling

OPTIONS: dict[str, dict[str, Any]] = {
    "gtpo_entropy": {"alpha1": 1.0, "alpha2": 0.1},
    "grpo_s": {"beta1": 1.0, "beta2": 0.1},
}
VOCABULARY, EXPERTS_PER_TOKEN = 152_064, 8
# as the command line sets them for the driver
DRIVER = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "passive"}


class Stages:
    """Runs one stage after the other and notes what each costs."""

    def __init__(self) -> None:
        self.costs: dict[str, dict[str, float]] = {}
        self.peak_bytes = 0

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before, started, cpu = (
            record.status_bytes("VmRSS"),
            time.perf_counter(),
            time.process_time(),
        )
        result = function()
        seconds, cpu, peak = (
            time.perf_counter() - started,
            time.process_time() - cpu,
            record.status_bytes("VmHWM"),
        )
        gc.collect()
        self.peak_bytes = max(self.peak_bytes, peak)
        cost = {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "peak_bytes": peak - before,
            "kept_bytes": record.status_bytes("VmRSS") - before,
        }
        self.costs[name] = cost
        gib = {
            key: f"{value / 2**30:.2f} GiB" for key, value in cost.items() if key.endswith("bytes")
        }
        print(
            f"{name:10s} {seconds:8.2f} s  cpu {cpu:8.2f} s  {gib}  resident {peak / 2**30:.2f} "
            "GiB",
            flush=True,
        )  # noqa: T201
        return result


# --------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------


def response_lengths(args: argparse.Namespace, sequences: int) -> Tensor:
    """(B,) tokens of each response, of about the mean that was asked for."""
    generator = torch.Generator().manual_seed(0)
    shape_B = torch.randn(sequences, generator=generator).mul_(0.8).exp_()
    return (shape_B * (args.mean_length / shape_B.mean())).round().long().clamp(1, args.longest)


def response(index: int, length: int, args: argparse.Namespace) -> Response:
    """What an engine says of one completion."""
    random = np.random.default_rng(index)
    total = args.prompt_length + length
    of_group = np.random.default_rng(index // args.group_size)
    prompt = of_group.integers(VOCABULARY, size=args.prompt_length, dtype=np.int32)
    return Response(
        tokens_S=np.concatenate([prompt, random.integers(VOCABULARY, size=length, dtype=np.int32)]),
        logprobs_T=-random.random(length, dtype=np.float32),
        actions=((args.prompt_length, total),),
        versions=((3, args.prompt_length, total),),
        reward=float(index % 2),
        score=float(index % 2),
        truncated=length == args.longest,
        extra_logs={"reward_failed": 0.0},
    )


def group_of(first: int, lengths: Sequence[int], args: argparse.Namespace) -> list[Response]:
    """The completions of the prompt whose first one has this number."""
    return [
        response(index, lengths[index], args) for index in range(first, first + args.group_size)
    ]


def prompt_of(first: int) -> Prompt:
    return Prompt(first, f"prompt {first:08d}", first)


def sent(value: Any) -> tuple[bytes, list[bytes]]:
    """The value on its way to another process."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, [bytes(buffer.raw()) for buffer in buffers]


def size_of(message: tuple[bytes, list[bytes]]) -> int:
    return len(message[0]) + sum(map(len, message[1]))


def received(message: tuple[bytes, list[bytes]]) -> Any:
    """The value as the other process has it."""
    return pickle.loads(message[0], buffers=message[1])


def scores_of(tokens: int, seed: int) -> list[np.ndarray]:
    """What a rank answers for its rows: log-probs and entropies of their response tokens."""
    random = np.random.default_rng(seed)
    return [-random.random(tokens, dtype=np.float32), random.random(tokens, dtype=np.float32)]


# --------------------------------------------------------------------------------------------------
# The step
# --------------------------------------------------------------------------------------------------


def step(args: argparse.Namespace, sequences: int, told: int | None = None) -> dict[str, Any]:
    """The costs of all stages, and of the whole; ``told`` bytes of experts a token come by Ray,
    None: without Ray."""
    stages, lengths = Stages(), response_lengths(args, sequences).tolist()
    receive, in_bytes = (
        pickled_groups(args, lengths) if told is None else groups_of_engine(args, lengths, told)
    )
    groups = stages.run("receive", receive)
    samples = responses_of(groups, args.group_size)

    def make_batch() -> SequenceBatch:
        batch = sequences_of(responses_of(groups, args.group_size))
        return routed_by_engines(batch, samples) if told else batch

    batch = stages.run("batch", make_batch)
    chunks = list(group_chunks(len(batch), args.group_size, args.mini_batch))
    costs = RowCosts(args.attention_length, shares_prompts=True)
    sizes: dict[str, list[int]] = {"receive": [in_bytes], "send": [], "collect": [], "ship": []}

    def send() -> list[list[int]]:
        parts = [own.rows for own in deal(batch, chunks, args.ranks, costs)]
        for rows in parts:
            sizes["send"].append(size_of(sent(batch.select(rows))))
        return parts

    parts = stages.run("send", send)
    results = [
        sent(scores_of(int(batch.counts_B[rows].sum()), rank)) for rank, rows in enumerate(parts)
    ]
    sizes["collect"] += map(size_of, results)

    def collect() -> LogprobEntropy:
        answers = [received(result) for result in results]
        return LogprobEntropy(
            *(scores_in_order(batch, parts, scores) for scores in zip(*answers, strict=True))
        )

    old = stages.run("collect", collect)
    results.clear()
    views = [stages.run("rollout", lambda: rollout_batch(samples, batch, old, args.group_size))]
    correction = {"level": "token", "mode": "mask"} if args.correction else None
    algorithm = get_algorithm(
        args.algorithm, correction=correction, **OPTIONS.get(args.algorithm, {})
    )
    shaped = stages.run("shape", lambda: algorithm.shape(views[0]))

    def measure() -> dict[str, float]:
        metrics = batch_metrics(views[0]) | reward_metrics(samples) | staleness_metrics(samples, 3)
        metrics |= advantage_gauges(shaped, args.group_size, views[0].rewards.tolist())
        return metrics | expected_of_first_update(shaped.mini_batch(chunks[0]), old.logprobs_N)

    stages.run("metrics", measure)
    views.clear()  # as the driver forgets it, before there are shards

    def make_shards() -> Any:
        deals = deal(batch, chunks, args.ranks, costs)
        return training_shards(shaped, chunks, deals, seed=1)

    shards = stages.run("shards", make_shards)
    stages.run("ship", lambda: sizes["ship"].extend(size_of(sent(shard)) for shard in shards))

    def plan() -> None:
        deal_rows(batch, args.ranks, costs)
        tokens, repeated = batch.lengths_B.tolist(), (batch.prompts.tokens_B // 2).tolist()
        for capacity in (args.forward_tokens, args.train_tokens):
            plan_micro_batches(batch, Sizes(tokens, repeated, capacity), 1, costs, 1)

    stages.run("plan", plan)
    for name, parts_bytes in sizes.items():
        stages.costs[name]["bytes"] = sum(parts_bytes)
    seconds = sum(cost["seconds"] for cost in stages.costs.values())
    print(
        f"total      {seconds:8.2f} s  resident peak {stages.peak_bytes / 2**30:.2f} GiB\n",
        flush=True,
    )  # noqa: T201
    found = {
        "sequences": sequences,
        "tokens": int(batch.lengths_B.sum()),
        "stages": stages.costs,
        "total_seconds": seconds,
        "peak_bytes": stages.peak_bytes,
    }
    return found if told is None else found | {"checkpoint": saved(stages, groups)}


def pickled_groups(
    args: argparse.Namespace, lengths: Sequence[int]
) -> tuple[Callable[[], list[Group]], int]:
    """What receives the groups, and their bytes."""
    firsts = range(0, len(lengths), args.group_size)
    messages = [sent(Group(prompt_of(first), group_of(first, lengths, args))) for first in firsts]
    return lambda: [received(message) for message in messages], sum(map(size_of, messages))


# --------------------------------------------------------------------------------------------------
# Routing replay
# --------------------------------------------------------------------------------------------------


class Engine:
    """In the place of a rollout engine: groups of completions, and the experts of a mixture as a
    second value."""

    def __init__(self, args: argparse.Namespace, lengths: Sequence[int], told: int) -> None:
        self.args, self.lengths, self.told = args, lengths, told

    def generate_group(self, request: GroupRequest) -> Any:
        """As ``RolloutEngine.generate_group``."""
        responses = group_of(request.label, self.lengths, self.args)
        return (responses, [self._experts(each) for each in responses]) if self.told else responses

    def _experts(self, response: Response) -> np.ndarray:
        shape = len(response.tokens_S) - 1, self.told // EXPERTS_PER_TOKEN, EXPERTS_PER_TOKEN
        return np.random.default_rng(len(response.tokens_S)).integers(
            128, size=shape, dtype=np.uint8
        )


class Supervisor:
    """What ``GroupRequests`` asks of ``EngineSupervisor``, of one engine that never fails."""

    changes = 0
    config = SimpleNamespace(vllm=SimpleNamespace(hang_timeout_s=3600.0))
    call = EngineSupervisor.call

    def __init__(self, engine: Any) -> None:
        self.engines = [engine]
        self.there = {0: engine}


def groups_of_engine(
    args: argparse.Namespace, lengths: Sequence[int], told: int
) -> tuple[Callable[[], list[Group]], int]:
    """What receives the groups, which an engine has finished, and 0: what they weigh in Ray's store
    is not asked."""
    # the engine's process cannot import this program
    pickle.register_pickle_by_value(sys.modules[__name__])
    tokens = sum(lengths) + args.prompt_length * len(lengths)
    store_bytes = 2 * tokens * (args.replay + 16) + 2**28  # the same with experts and without
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=store_bytes)
    requests = GroupRequests(
        Supervisor(ray.remote(Engine).remote(args, lengths, told)), len(lengths), bool(told)
    )
    prompts = {first: prompt_of(first) for first in range(0, len(lengths), args.group_size)}
    for first, prompt in prompts.items():
        requests.ask(
            first,
            GroupRequest(prompt.text, prompt.label, args.group_size, Sampling(1.0, 1.0, 0, 0)),
        )
    ray.wait(requests.pending, num_returns=len(prompts), fetch_local=False)

    def receive() -> list[Group]:
        groups: list[Group] = []
        while len(groups) < len(prompts):
            groups += [
                Group(prompts[first], responses) for first, responses in requests.answers(1.0)
            ]
        return groups

    return receive, 0


def saved(stages: Stages, groups: Sequence[Group]) -> dict[str, float]:
    """The cost of a checkpoint's groups (``TrainingLoop.state``), if all waited."""
    before = record.status_bytes("RssAnon")
    kept = stages.run("checkpoint", lambda: plain_groups(groups))
    own_bytes = record.status_bytes("RssAnon") - before
    del kept
    return stages.costs.pop("checkpoint") | {"own_bytes": own_bytes}


def replay(args: argparse.Namespace) -> dict[str, Any]:
    """The step without experts and with them, and by how much the driver's peak grows."""
    without, told = (
        in_a_process(args, args.replay_sequences, bytes_) for bytes_ in (0, args.replay)
    )
    growth = told["peak_bytes"] / without["peak_bytes"] - 1
    return {"bytes_per_token": args.replay, "without": without, "with": told, "growth": growth}


def text() -> str:
    """For docs/scaling.md."""
    found = record.load("scale_cpu.json")["replay"]
    told, gib = found["with"], 2**30
    return record.wrapped(
        "`train.routing_replay rollout` adds little to the driver's memory: with "
        f"{told['sequences']:,} sequences, {told['tokens']:,} tokens, and "
        f"{found['bytes_per_token']} bytes of experts a token, its resident peak in a step "
        f"changes by {round(100 * found['growth'], 1) + 0.0:+.1f} % "  # + 0.0: no "-0.0"
        f"from {found['without']['peak_bytes'] / gib:.2f} GiB "
        "([benchmarks/results/scale_cpu.json](../benchmarks/results/scale_cpu.json)): "
        f"references travel, and the {told['tokens'] * found['bytes_per_token'] / gib:.1f} GiB "
        "stay in Ray's store. A checkpoint with groups that wait for training is the exception: "
        "the driver fetches their experts. If all of these waited, it would make a copy of "
        f"{told['checkpoint']['own_bytes'] / gib:.1f} GiB, and have the store's pages mapped "
        f"besides (a peak of {told['checkpoint']['peak_bytes'] / gib:.1f} GiB)."
    )


TEXTS = {"text": text}


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


def in_a_process(
    args: argparse.Namespace, sequences: int, told: int | None = None
) -> dict[str, Any]:
    """`step` in a process of its own, whose memory nobody has used before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_step_with_threads, args, sequences, told).result()


def _step_with_threads(
    args: argparse.Namespace, sequences: int, told: int | None
) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    return step(args, sequences, told)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What a number needs to be repeated."""
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    return {**record.environment("torch"), "variables": DRIVER, "settings": settings}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=16384, help="completions of the step")
    parser.add_argument("--group_size", type=int, default=16, help="completions per prompt")
    parser.add_argument("--prompt_length", type=int, default=512)
    parser.add_argument("--mean_length", type=int, default=8192, help="mean tokens of a response")
    parser.add_argument("--longest", type=int, default=32768, help="most tokens of a response")
    parser.add_argument("--algorithm", default="gtpo_entropy")
    parser.add_argument(
        "--correction", action=argparse.BooleanOptionalAction, default=True, help="of the mismatch"
    )
    parser.add_argument(
        "--mini_batch", type=int, default=1024, help="completions per optimizer step"
    )
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks")
    parser.add_argument(
        "--attention_length", type=float, default=100_000.0, help="see ModelShape.attention_length"
    )
    parser.add_argument(
        "--forward_tokens", type=int, default=32768, help="of a micro-batch that computes log-probs"
    )
    parser.add_argument(
        "--train_tokens", type=int, default=16384, help="of a micro-batch that trains"
    )
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument(
        "--replay", type=int, metavar="BYTES", help="of experts a token (default: not measured)"
    )
    parser.add_argument(
        "--replay_sequences", type=int, default=1024, help="completions with --replay"
    )
    parser.add_argument("--output", type=Path)
    return parser


def main() -> None:
    args = parser().parse_args()
    os.environ.update(DRIVER)
    found = {"environment": environment(args)}
    quarter = in_a_process(args, args.sequences // 4 // args.group_size * args.group_size)
    found |= in_a_process(args, args.sequences)
    found |= {"quarter": quarter, "growth": found["total_seconds"] / quarter["total_seconds"]}
    if args.replay:
        found["replay"] = replay(args)
    if args.output:
        record.write(args.output, found)


if __name__ == "__main__":
    main()
