"""Call 3: one rank of the 32B recipe at its real size, with random weights: memory, step time and MFU.

The model is what a rank with TP8 PP2 holds of Qwen2.5-32B, with both ends: embedding and vocabulary projection, of
which a real rank has one. Megatron is told of a model of these sizes without parallelism, so nothing is communicated.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.gpu.kit import Machine
from tests.gpu.one_rank import one_rank, ready

_KINDS = ("parameters", "gradients", "optimizer")
_REPEATS = 3
_CELL_S = 60.0
"""No cell is begun with less time left; the longest is expected to take a third of it."""


def memory_and_mfu(machine: Machine) -> dict:
    """Every way to recompute at packs of 16k and 32k tokens.

    Returns:
        ``states``: bytes of weights, gradients and optimizer, measured and as ``train_ppo_ray --dry_run`` predicts
        them. For every mode and pack: peak bytes, seconds of forward and backward and of the whole step, MFU (of the
        model's operations: recomputing is not counted). A cell that does not fit says so, one for which there was no
        time is missing and named.

    Raises:
        AssertionError: the states are not what was predicted, everything recomputed does not fit or takes no less than
            nothing recomputed, or log-probs are not finite.
    """
    ready(machine)
    deadline = time.monotonic() + machine.seconds
    predicted = _predicted_bytes(machine)
    measured: dict[str, Any] = {"not_measured": []}
    with one_rank(machine) as policies:
        model = _model(machine, policies)
        # the most telling first: what fits anywhere, then what is fastest
        for mode, recompute in sorted(policies.RECOMPUTE.items(), key=lambda item: item[0] != "full, uniform"):
            policies.empty_device()
            policy = None
            for tokens in (16384, 32768) if machine.on_gpu else (256,):
                cell = f"{tokens} tokens, recompute {mode}"
                if machine.on_gpu and time.monotonic() > deadline - _CELL_S:
                    measured["not_measured"].append(cell)
                    continue
                if policy is None:
                    policy = policies.random_policy(model, "bf16", recompute=recompute, optimizer=_optimizer(policies))
                    measured["layers"] = policy.layers
                policy.settings = _with_tokens(policy.settings, tokens)
                measured[cell] = _cell(machine, policies, policy, tokens)
                print(cell, measured[cell], flush=True)  # kept if a later cell ends the process
            if policy is not None and "states" not in measured:
                measured["states"] = _require_states(policies, policy, predicted)
            del policy
    _require_cells(machine, measured)
    return measured


def adapters_of_7b(machine: Machine) -> dict:
    """Qwen2.5-7B whole on this GPU with random weights, adapters of rank 16 at all linears: memory, seconds of a step,
    and of what a weight sync exports, the adapters or the weights with them.

    Raises:
        AssertionError: more has a gradient than the adapters, or log-probs are not finite.
    """
    ready(machine)
    with one_rank(machine) as policies:
        from openrlhf_ext.megatron.layers.adapted import merged_values, scaled_values

        sizes = (28, 3584, 28, 4, 128, 18944, 152064) if machine.on_gpu else (2, 64, 5, 1, 16, 96, 128)
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        lora, tokens = policies.Adapter(16, 32.0, 0.0, names), 16384 if machine.on_gpu else 256
        policy = policies.random_policy(
            policies.Model(*sizes), "bf16", recompute=policies.RECOMPUTE["full, uniform"], lora=lora,
            optimizer=_optimizer(policies),
        )  # fmt: skip
        policy.settings = _with_tokens(policy.settings, tokens)
        states = policies.ModelStates(policy.models, policy.optimizer, policy.device, policy.settings.converters)
        measured: dict[str, Any] = {"layers": policy.layers, "tokens": tokens}
        measured |= _cell(machine, policies, policy, tokens)
        measured |= {f"{kind}_bytes": states.nbytes(kind) for kind in _KINDS}
        if measured["gradients_bytes"] > 0.02 * measured["parameters_bytes"] and machine.on_gpu:
            raise AssertionError(f"gradients of more than the adapters: {measured}")
        adapters = policy.adapter_exporter(scaled_values(policy.chunks, policy.dtype), 1, policy.dtype)
        for what, exporter in (("adapters", adapters), ("merged", policy.exporter(merged_values(policy.chunks)))):
            exported: list[int] = []
            seconds = _seconds(machine, lambda out=exported, of=exporter: out.extend(t.nbytes for _, t in of))
            measured |= {f"export_{what}_seconds": seconds, f"export_{what}_bytes": sum(exported)}
        return measured


def _model(machine: Machine, policies: ModuleType) -> Any:
    if machine.on_gpu:
        return policies.Model(32, 5120, 5, 1, 128, 3456, 19008)
    return policies.Model(2, 64, 5, 1, 16, 96, 128)


def _optimizer(policies: ModuleType) -> Any:
    """A rate at which some steps towards nothing do not make a random model diverge."""
    return policies.Actor(adam=policies.Adam(lr=1e-6), lr_scheduler="constant")


def _with_tokens(settings: Any, tokens: int) -> Any:
    from tests.megatron.parity import micro_batches

    return replace(settings, train=micro_batches(1, tokens))


# ---- one cell -------------------------------------------------------------------------------------------------------


def _cell(machine: Machine, policies: ModuleType, policy: Any, tokens: int) -> dict:
    batch, loss = policies.random_batch(_lengths(tokens), policy.shape.vocab_size)
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        return _measure(machine, policy, batch, loss)
    except torch.OutOfMemoryError as error:
        problem = str(error).splitlines()[0]
    policies.empty_device()  # outside of the handler, whose traceback holds the activations
    return {"out_of_memory": problem}


def _lengths(tokens: int) -> list[tuple[int, int]]:
    """Prompt and response of a half, a quarter and two eighths of the pack."""
    parts = [tokens // 2, tokens // 4, tokens // 8, tokens // 8]
    return [(part // 16, part - part // 16) for part in parts]


def _measure(machine: Machine, policy: Any, batch: Any, loss: Any) -> dict:
    from openrlhf_ext.megatron.model.flops import forward_flops, peak_tflops

    first = _seconds(machine, lambda: policy.train_step(batch, loss, loss))  # Adam makes its states in the first step
    gradients = [_seconds(machine, lambda: policy.accumulate_gradients(batch, loss, loss)) for _ in range(_REPEATS)]
    step = _seconds(machine, lambda: policy.train_step(batch, loss, loss))
    forward = _seconds(machine, lambda: _require_finite(policy.logprobs(batch).logprobs_N))
    flops = forward_flops(policy.shape, batch.lengths_B.tolist(), int(batch.counts_B.sum()))
    flops = replace(flops, frozen=policy.lora is not None)
    seconds = statistics.median(gradients)
    found = {
        "first_step_seconds": first, "step_seconds": step, "forward_backward_seconds": seconds,
        "logprobs_seconds": forward, "model_tflop": flops.training / 1e12,
    }  # fmt: skip
    if not machine.on_gpu:
        return found
    peak = peak_tflops(torch.cuda.get_device_name())
    free, total = torch.cuda.mem_get_info()
    return found | {
        "tflops_per_second": flops.training / 1e12 / seconds,
        "mfu": None if peak is None else flops.training / 1e12 / seconds / peak,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(), "device_used_bytes": total - free,
    }  # fmt: skip


def _seconds(machine: Machine, work: Callable[[], Any]) -> float:
    if machine.on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if machine.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _require_finite(logprobs_N: torch.Tensor) -> None:
    if not torch.isfinite(logprobs_N).all():
        raise AssertionError(f"{(~torch.isfinite(logprobs_N)).sum()} of {len(logprobs_N)} log-probs are not finite")


# ---- what was predicted ---------------------------------------------------------------------------------------------


def _predicted_bytes(machine: Machine) -> dict[str, int]:
    """Bytes by kind of state, as ``tools.plan`` says before a run; it builds the model on the meta device."""
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.tools.plan.layout_proof import prove_layout
    from tests.gpu import policies

    with tempfile.TemporaryDirectory() as folder:
        model = _model(machine, policies).write(Path(folder))
        (share,) = prove_layout(model, ParallelLayout(1), torch.bfloat16, distributed_optimizer=True).shares
    return dict(zip(_KINDS, (share.weight_bytes, share.gradient_bytes, share.optimizer_bytes), strict=True))


def _require_states(policies: ModuleType, policy: Any, predicted: dict[str, int]) -> dict:
    """Measured and predicted bytes, which may differ by what alignment takes."""
    states = policies.ModelStates(policy.models, policy.optimizer, policy.device, policy.settings.converters)
    found = {kind: {"bytes": states.nbytes(kind), "predicted_bytes": predicted[kind]} for kind in _KINDS}
    for kind, sizes in found.items():
        if abs(sizes["bytes"] - sizes["predicted_bytes"]) > 0.01 * sizes["predicted_bytes"]:
            raise AssertionError(f"{kind} take {sizes['bytes']} bytes, {sizes['predicted_bytes']} were predicted")
    return found


def _require_cells(machine: Machine, measured: dict[str, Any]) -> None:
    if not machine.on_gpu:
        return
    kept, recomputed = (measured.get(f"16384 tokens, recompute {mode}", {}) for mode in ("none", "full, uniform"))
    if "out_of_memory" in recomputed:
        raise AssertionError(f"a pack of 16384 tokens does not fit with everything recomputed: {recomputed}")
    key = "peak_allocated_bytes"
    if key in kept and key in recomputed and not recomputed[key] < kept[key]:
        raise AssertionError(f"recomputing everything saves nothing: {recomputed[key]} bytes, {kept[key]} without")
