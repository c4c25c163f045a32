"""Some layers of a 32B model through our own policy: train step and log-prob pass, with random
weights."""

from __future__ import annotations

import functools
import math
import statistics
from types import ModuleType
from typing import Any

import torch

from benchmarks.fp8_study.cells import Cell
from benchmarks.fp8_study.measuring import synchronize
from benchmarks.fp8_study.settings import rank_sizes
from benchmarks.harness import seconds_in_turns
from openrlhf_ext.fp8.recipe import Recipe
from tests.gpu.kernels import profiled
from tests.gpu.kit import Machine, NotHere
from tests.gpu.one_rank import one_rank

_WARM_UP = 2  # delayed: the scales of gradients are 1 before the first
_SAMPLED = 256


def measure(machine: Machine, cell: Cell, study: dict[str, Any]) -> dict[str, Any]:
    """Speed, memory, and what the same weights and tokens give: loss, gradient norm, some
    log-probs.

    Raises:
        AssertionError: the layers are not TransformerEngine's on a GPU.
        NotHere: they do not fit into its memory.
    """
    try:
        return _measure(machine, cell, study)
    except torch.OutOfMemoryError as error:
        raise NotHere(f"does not fit: {str(error).splitlines()[0]}") from error


def _measure(machine: Machine, cell: Cell, study: dict[str, Any]) -> dict[str, Any]:
    settings, tokens, recipe = study["layers"], cell.tokens, cell.recipe(emulate=not machine.on_gpu)
    micro_batches = settings["many_micro_batches" if cell.variant == "many" else "micro_batches"]
    with one_rank(machine) as policies:
        policy = _policy(machine, policies, recipe, cell, settings)
        lengths = [(tokens // 16, tokens - tokens // 16)] * micro_batches
        batch, weighted = policies.random_batch(lengths, settings["vocabulary"])
        count = len(weighted.weights_N)
        loss = policies.WeightedLogprob(torch.full((count,), 1.0 / count), batch.responses)
        for _ in range(_WARM_UP):
            policy.accumulate_gradients(batch, loss, loss)
        found = _values(policy, batch, loss)
        found |= _speed(machine, policy, batch, loss, settings["repeats"])
        tokens_of_all = tokens * micro_batches
        return {
            "layers": policy.layers,
            "recipe": "none" if recipe is None else recipe.label,
            "ranks": cell.ranks,
            "tokens": tokens_of_all,
            **found,
            **_rates(policy, batch, found, tokens_of_all, study),
        }


def _policy(
    machine: Machine, policies: ModuleType, recipe: Recipe | None, cell: Cell, settings: dict
) -> Any:
    own = rank_sizes(settings, cell.ranks)
    model = policies.Model(
        settings["num_layers"],
        settings["hidden"],
        own["heads"],
        own["kv_heads"],
        settings["head_dim"],
        own["mlp"],
        settings["vocabulary"],
    )
    recompute = policies.RECOMPUTE["full, uniform" if cell.variant == "recompute" else "none"]
    optimizer = policies.Actor(adam=policies.Adam(lr=1e-6), lr_scheduler="constant")
    policy = policies.random_policy(
        model,
        "bf16" if machine.on_gpu else "fp32",
        max_tokens=cell.tokens,
        optimizer=optimizer,
        fp8=recipe,
        recompute=recompute,
    )
    if machine.on_gpu and policy.layers != "TransformerEngine":
        raise AssertionError(
            f"the layers are {policy.layers}, not TransformerEngine's: give --bundle"
        )
    return policy


def _values(policy: Any, batch: Any, loss: Any) -> dict[str, Any]:
    """Before any update: the same for all recipes apart from rounding."""
    metrics = policy.accumulate_gradients(batch, loss, loss)
    squares = [
        parameter.main_grad.double().square().sum()
        for chunk in policy.chunks
        for parameter in chunk.parameters()
    ]
    logprobs_N = policy.logprobs(batch).logprobs_N
    return {
        "loss": metrics["loss/policy"],
        "gradient_norm": math.sqrt(torch.stack(squares).sum().item()),
        "logprobs": logprobs_N[:: max(1, len(logprobs_N) // _SAMPLED)].tolist(),
    }


def _speed(machine: Machine, policy: Any, batch: Any, loss: Any, repeats: int) -> dict[str, Any]:
    def timed(work: Any) -> float:
        wait = functools.partial(synchronize, machine.device)
        seconds = seconds_in_turns({"work": work}, repeats, synchronize=wait)
        return statistics.median(seconds["work"])

    def kernels(work: Any) -> dict[str, Any]:
        whole = profiled(machine, work)
        return {
            "device_seconds": whole["seconds"],
            "groups": whole["groups"],
            "attention": whole["attention"],
        }

    _reset_peak(machine)
    found: dict[str, Any] = {"logprobs_seconds": timed(lambda: policy.logprobs(batch))}
    found |= _peak(machine, "logprobs")
    found["forward_backward_seconds"] = timed(
        lambda: policy.accumulate_gradients(batch, loss, loss)
    )
    policy.train_step(batch, loss, loss)  # Adam makes its states in the first step
    _reset_peak(machine)
    found["step_seconds"] = timed(lambda: policy.train_step(batch, loss, loss))
    found |= _peak(machine, "step")
    # of the device alone, afterwards: the profiler costs the host time
    found["logprobs_kernels"] = kernels(lambda: policy.logprobs(batch))
    found["forward_backward_kernels"] = kernels(
        lambda: policy.accumulate_gradients(batch, loss, loss)
    )
    found["optimizer_kernels"] = kernels(policy.optimizer_step)
    return found


def _reset_peak(machine: Machine) -> None:
    if machine.on_gpu:
        torch.cuda.reset_peak_memory_stats()


def _peak(machine: Machine, what: str) -> dict[str, int]:
    if not machine.on_gpu:
        return {}
    return {
        f"{what}_allocated_bytes": torch.cuda.max_memory_allocated(),
        f"{what}_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _rates(
    policy: Any, batch: Any, found: dict[str, Any], tokens: int, study: dict[str, Any]
) -> dict[str, Any]:
    """Tokens and operations a second; forward and backward without the optimizer, as its work is
    not the tokens'."""
    from openrlhf_ext.megatron.model.flops import forward_flops

    lengths, responses = batch.lengths_B.tolist(), int(batch.counts_B.sum())
    mine = forward_flops(policy.shape, lengths, responses)
    train, forward = found["forward_backward_seconds"], found["logprobs_seconds"]
    rates: dict[str, Any] = {
        "train_tokens_per_second": tokens / train,
        "logprobs_tokens_per_second": tokens / forward,
        "step_tokens_per_second": tokens / found["step_seconds"],
        "train_tflops": mine.training / train / 1e12,
        "logprobs_tflops": mine.total / forward / 1e12,
    }
    for precision in ("bf16", "fp8"):
        if (peak := study[f"peak_{precision}_tflops"]) is not None:
            rates[f"train_mfu_{precision}"] = rates["train_tflops"] / peak
            rates[f"logprobs_mfu_{precision}"] = rates["logprobs_tflops"] / peak
    return rates
