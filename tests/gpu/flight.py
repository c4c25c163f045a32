"""Whole runs on one machine, for calls 5 and 6: driver, policy rank and engine on one GPU, on a CPU
the same small.

Every check is the command that a user types, with one thing changed (``runs.Runs.given``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import torch

from tests.gpu import te_build
from tests.gpu.kit import Machine, NotHere
from tests.gpu.runs import (
    REAL_MODEL,
    ROOT,
    Run,
    Runs,
    real_checkpoint,
    report,
    write_problems,
    write_reward,
)
from tests.models import make_tiny_policy

_LEFT_MIB = 64.0  # of a run that has ended; what the driver's clocks and caches may move meanwhile
_GAP = 1.3
"""Seconds of a step over those that ``plan`` says that are still what was hoped for."""
_SYNC_S = 0.5


# ---- call 5


def base(machine: Machine) -> dict:
    """Three updates: weights reach the engine over CUDA IPC and are proved by checksums and the
    probe after each."""
    with Runs.open(machine, "base") as runs:
        return report(machine, runs.run("base").measured())


def drift_check(machine: Machine) -> dict:
    """With learning rate 0 no weight moves, whatever sleeps and wakes meanwhile."""
    with Runs.open(machine, "drift_check") as runs:
        run = runs.run("drift", train__drift_check="true", said="weights unchanged")
        return report(machine, run.measured())


def graphs(machine: Machine) -> dict:
    """The same run with compiled engines and CUDA graphs, which is a run's default: the same
    agreement."""
    machine.need_gpu("a run with CUDA graphs, which is base without them,")
    with Runs.open(machine, "graphs") as runs:
        return report(machine, runs.run("graphs", vllm__enforce_eager="false").measured())


def v1_runner(machine: Machine) -> dict:
    """The same run with vLLM's first model runner."""
    machine.need_gpu("choosing the runner, on a CPU it is the first,")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with Runs.open(machine, "v1_runner") as runs:
        return report(machine, runs.run("v1").measured())


def entropies(machine: Machine) -> dict:
    """The sampler tells entropies where vLLM tells ranks: those of the policy.

    Raises:
        AssertionError: the two differ by more than rounding on average.
    """
    with Runs.open(machine, "entropies") as runs:
        found = runs.run("entropies", algo__entropies="engine").measured()
    gap = found.get("mismatch/entropy_mean_abs")
    if gap is None or not gap < 0.02:
        raise AssertionError(
            f"entropies of policy and engine differ by {gap} nats on average, at most 0.02"
        )
    return report(machine, found, ["V2 sampler's patch"])


def adapters(machine: Machine) -> dict:
    """Adapters of rank 16 are what travels; the engine's base sleeps at level 1."""
    with Runs.open(machine, "adapters") as runs:
        run = runs.run("adapters", ds__lora__rank=16, actor__adam__lr=1e-3)
        return report(machine, run.measured(), ["adapter kernels of vLLM", "sleep level 1"])


def mixture(machine: Machine) -> dict:
    """A mixture of experts, whose engine tells which experts it took, and with these the policy
    agrees."""
    with Runs.open(machine, "mixture") as runs:
        runs.policy = runs.folder / "experts"
        # of two a token the order of addition would not matter
        experts = {"num_experts": 16, "num_experts_per_tok": 8}
        make_tiny_policy(runs.policy, "qwen3_moe", num_hidden_layers=4, head_dim=32, **experts)
        run = runs.run(
            "mixture", train__routing_replay="rollout", vllm__enable_prefix_caching="true"
        )
    changed = [record["moe/replay_changed"] for record in run.records]
    return report(machine, {**run.measured(), "replay_changed": changed}, ["vLLM's routed experts"])


def fp8(machine: Machine) -> dict:
    """FP8 engines of a bf16 policy: every layer is proved quantized after every update."""
    with Runs.open(machine, "fp8") as runs:
        runs.largest_kl = 5e-2
        return report(
            machine, runs.run("fp8", fp8__rollout_enable="true").measured(), ["CUTLASS FP8 kernels"]
        )


# ---- call 6: failures and repetition


def killed_generating(machine: Machine) -> dict:
    """SIGKILL to the engine's process while it generates, in step 2: it is replaced, and nothing of
    it is left."""
    return _killed(machine, "killed_generating", "tests.gpu.killed_generating")


def killed_in_a_sync(machine: Machine) -> dict:
    """SIGKILL to the engine's process when it has half of an update."""
    return _killed(
        machine, "killed_in_a_sync", "tests.e2e.killed_in_a_sync", weight_sync__bucket_mib=1
    )


def _killed(machine: Machine, name: str, module: str, **more: object) -> dict:
    before = _device_used_mib(machine)
    with Runs.open(machine, name) as runs:
        run = runs.run(name, module=module, **more)
        if not (runs.folder / "killed").exists():
            raise AssertionError("no engine was killed")
    restarts = [record["engines/restarts"] for record in run.records]
    if restarts[-1] != 1:
        raise AssertionError(f"one engine was killed, {restarts} were replaced by step")
    left = _device_used_mib(machine) - before
    if left > _LEFT_MIB:
        raise AssertionError(f"{left:.0f} MiB of the device are still in use after the run")
    found = {
        **run.measured(),
        "restarts": restarts,
        "device_left_mib": left if machine.on_gpu else None,
    }
    return report(machine, found, ["EngineCore in a process of its own"])


def _device_used_mib(machine: Machine) -> float:
    if not machine.on_gpu:
        return 0.0
    free, total = torch.cuda.mem_get_info(machine.device)
    return (total - free) / 2**20


def determinism(machine: Machine) -> dict:
    """Full determinism, twice: the same tokens with the same log-probs, and the same numbers in
    every record.

    Raises:
        AssertionError: naming the first sample or metric that differs.
    """
    with Runs.open(machine, "determinism") as runs:
        runs.steps = 2
        options = {
            "train__full_determinism_enable": "true",
            "logger__samples_every": 1,
            "logger__samples_groups": 4,
        }
        one, other = (runs.run(name, **options) for name in ("first", "second"))
        samples, again = one.samples(), other.samples()
    for number, (left, right) in enumerate(zip(samples, again, strict=True)):
        if left != right:
            keys = [key for key in left if left[key] != right[key]]
            raise AssertionError(
                f"sample {number} of the second run differs in {keys}:\n{left}\n{right}"
            )
    different = {
        (record["step"], name): (value, repeated[name])
        for record, repeated in zip(one.records, other.records, strict=True)
        for name, value in record.items()
        if name.startswith((*_REPEATED, *(_OF_ENGINES if machine.on_gpu else ())))
        and repeated[name] != value
    }
    if different:
        raise AssertionError(f"the same run twice has other numbers: {different}")
    found = {**one.measured(), "samples": len(samples), "second": other.measured()}
    return report(machine, found, ["batch-invariant kernels"])


_REPEATED = ("reward/", "loss/", "grad_norm", "entropy/", "tokens/generated")
"""What depends on weights and samples alone, not on clocks."""
_OF_ENGINES = ("kl/", "mismatch/", "weight_sync/probe_diff")
"""What engines' log-probs are in, whose last bits depend on the batch where kernels are not
batch-invariant."""


# ---- call 6: real sizes


def real_model(machine: Machine) -> dict:
    """A pretrained model in bf16, 20 updates: the probe's difference and ``kl/rollout`` of each.

    OPENRLHF_EXT_REAL_MODEL names a checkpoint in Hugging Face form, or the folder with SmolLM2's
    GGUF file, which is converted (``examples/python/real_model.py``, package gguf).
    """
    if not os.environ.get(REAL_MODEL):
        raise NotHere(
            f"a real model: {REAL_MODEL} names a checkpoint, or the folder with its GGUF file"
        )
    with Runs.open(machine, "real_model") as runs:
        return report(machine, _real(runs, "real"))


def _real(runs: Runs, name: str) -> dict:
    """On a CPU one update of few samples, none of which may be right: with a reward that differs
    all the same."""
    on_gpu = runs.machine.on_gpu
    runs.policy, runs.steps = real_checkpoint(runs.folder), 20 if on_gpu else 1
    prompts, samples, tokens = (8, 8, 24) if on_gpu else (4, 4, 12)
    runs.prompts, runs.reward = runs.folder / "sums.jsonl", ROOT / "examples/python/reward_gsm8k.py"
    write_problems(runs.prompts, prompts * runs.steps, "What is {a} + {b}?")
    runs.options = {
        "config": "configs/real_model.yaml",
        "train.max_staleness": 0,
        "data.max_samples": prompts * runs.steps,
        "rollout.batch_size": prompts,
        "rollout.n_samples_per_prompt": samples,
        "train.batch_size": prompts * samples,
        "rollout.max_new_tokens": tokens,
    }
    if not on_gpu:
        runs.reward = runs.folder / "reward_real.py"
        write_reward(runs.reward)
        runs.options["algo.advantage.estimator"] = "grpo"
    run = runs.run(name)
    each = {
        key: [record[key] for record in run.records]
        for key in ("weight_sync/probe_diff", "kl/rollout")
    }
    return {**run.measured(), **{f"{key} of every step": values for key, values in each.items()}}


def of_7b(machine: Machine) -> dict:
    """Two updates of a random model of Qwen2.5-7B's shape: adapters of rank 16, merged: a sync
    brings all weights.

    Returns:
        Seconds of a step by phase beside those that ``openrlhf-ext plan`` says for the same
        options, most memory beside the sum that it and a run's start make (``ranks.shared_gpu``);
        under ``reached`` which of the figures hoped for were, which decides nothing here.
    """
    from tests.gpu.shapes import SEVEN_B, TINY, make_checkpoint

    with Runs.open(machine, "of_7b") as runs:
        shape = SEVEN_B if machine.on_gpu else TINY
        runs.policy = make_checkpoint(runs.folder / "random", shape, machine.device)
        runs.prompts, runs.reward, runs.steps = (
            runs.folder / "sums.jsonl",
            runs.folder / "reward_7b.py",
            2,
        )
        write_problems(runs.prompts, 64, "What is {a} + {b}?")
        write_reward(runs.reward)
        prompts, samples, tokens = (32, 8, 512) if machine.on_gpu else (4, 4, 16)
        share = 0.5 if _device_gib(machine) > 100 else 0.35
        options: dict[str, object] = {
            "data.max_samples": 2 * prompts,
            "rollout.batch_size": prompts,
            "rollout.n_samples_per_prompt": samples,
            "train.batch_size": prompts * samples,
            "rollout.max_new_tokens": tokens,
            "data.max_len": tokens + 64,
            "algo.advantage.estimator": "grpo",
            "ds.lora.rank": 16,
            "vllm.lora": "merged",
            "actor.adam.lr": 1e-3,
            "vllm.enforce_eager": "false",
            "vllm.gpu_memory_utilization": share,
            "train.dynamic_batch_enable": "true",
            "train.max_tokens_per_gpu": 16384,
            "rollout.max_tokens_per_gpu": 16384,
            "megatron.recompute": "full",
        }
        runs.options = options
        predicted = _planned(runs, machine, tokens)
        run = runs.run("of_7b")
    return report(
        machine, _beside(run, predicted, machine), ["graphs at size", "memory of a shared GPU"]
    )


def _device_gib(machine: Machine) -> float:
    return (
        torch.cuda.get_device_properties(machine.device).total_memory / 2**30
        if machine.on_gpu
        else 0.0
    )


def _planned(runs: Runs, machine: Machine, tokens: int) -> dict:
    """What ``openrlhf-ext plan`` says of these options on this GPU, or on an H100 where there is
    none."""
    name = torch.cuda.get_device_name(machine.device) if machine.on_gpu else ""
    file = runs.folder / "plan.json"
    given = runs.given("of_7b", {})
    words = [word for option, value in given.items() for word in (f"--{option}", str(value))]
    words += ["--gpu", "H200" if "H200" in name else "H100", "--gpus", "1", "--json", str(file)]
    # a random model ends hardly any response early
    command = [
        sys.executable,
        "-m",
        "openrlhf_ext.cli.plan",
        *words,
        "--response_tokens",
        str(tokens),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(
            f"openrlhf-ext plan ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    configured = json.loads(file.read_text())["configured"]
    if configured is None:
        raise AssertionError(
            f"openrlhf-ext plan does not allow the run's own layout:\n{done.stdout[-2000:]}"
        )
    return configured


def _beside(run: Run, predicted: dict, machine: Machine) -> dict:
    last, found = run.records[-1], run.measured()
    gib = {doing: sum(parts.values()) / 2**30 for doing, parts in predicted["memory"].items()}
    found |= {
        "planned_seconds": predicted["seconds"],
        "planned_gib": gib,
        "planned_memory": predicted["memory"],
    }
    found["sync_gib_per_second"] = last["weight_sync/bytes"] / 2**30 / last["weight_sync/seconds"]
    if machine.on_gpu:
        planned, step = predicted["seconds"]["step"], last["time/step"]
        found["reached"] = {
            f"a sync below {_SYNC_S} s": last["weight_sync/seconds"] < _SYNC_S,
            f"step seconds within {_GAP} times of plan's": planned / _GAP <= step <= planned * _GAP,
            "no more memory than planned": last["memory/device_max_gib"] <= max(gib.values()),
        }
    return found


def transformer_engine(machine: Machine) -> dict:
    """The base run and, where there is one, the real model's with TransformerEngine's layers,
    beside vLLM in one
    machine: cuDNN's parts are one version's (``patches/transformer_engine_cudnn.py``)."""
    machine.need_gpu("TransformerEngine")
    te_build.use(machine.bundle)
    if importlib.util.find_spec("transformer_engine") is None:
        raise NotHere("TransformerEngine was not built: tests.gpu.te_build:build says why")
    with Runs.open(machine, "transformer_engine") as runs:
        found = {"base": runs.run("base").measured()}
    if os.environ.get(REAL_MODEL):
        with Runs.open(machine, "transformer_engine") as runs:
            found["real model"] = _real(runs, "real")
    return found
