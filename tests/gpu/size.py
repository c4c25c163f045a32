"""Call 3: one rank of the 32B recipe at its real size, with random weights: memory, step time and
MFU.

The model is what a rank with TP8 PP2 holds of Qwen2.5-32B, with both ends: embedding and vocabulary
projection, of which a real rank has one. Megatron is told of a model of these sizes without
parallelism, so nothing is communicated, and norms and residuals see all tokens of a pack, of which
a rank with sequence parallelism has an eighth: their time in ``profiles`` is up to eight times that
of such a rank, and only that of one without.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.gpu.kernels import profiled
from tests.gpu.kit import Machine, Partly
from tests.gpu.one_rank import one_rank, ready

_KINDS = ("parameters", "gradients", "optimizer")
_REPEATS = 3
_LARGE_BYTES = 120e9
_CELL_S = 60.0
"""No cell is begun with less time left; the longest is expected to take a third of it."""


def memory_and_mfu(machine: Machine) -> dict:
    """Every way to recompute at packs of 16k and 32k tokens.

    Returns:
        ``states``: bytes of weights, gradients and optimizer, measured and as
        ``train_ppo_ray --dry_run`` predicts them. For every mode and pack: peak bytes, seconds of
        forward and backward and of the whole step, MFU (of the model's operations: recomputing is
        not counted). A cell that does not fit says so, one for which there was no time is missing
        and named.

    Raises:
        AssertionError: the states are not what was predicted, everything recomputed does not fit or
            takes no less than nothing recomputed, or log-probs are not finite.
    """
    ready(machine)
    deadline = time.monotonic() + machine.seconds
    predicted = _predicted_bytes(machine)
    measured: dict[str, Any] = {"not_measured": []}
    with one_rank(machine) as policies:
        model = _model(machine, policies)
        # the most telling first: what fits anywhere, then what is fastest
        for mode, recompute in sorted(
            policies.RECOMPUTE.items(), key=lambda item: item[0] != "full, uniform"
        ):
            policies.empty_device()
            policy = None
            for tokens in (16384, 32768) if machine.on_gpu else (256,):
                cell = f"{tokens} tokens, recompute {mode}"
                if machine.on_gpu and time.monotonic() > deadline - _CELL_S:
                    measured["not_measured"].append(cell)
                    continue
                if policy is None:
                    policy = policies.random_policy(
                        model, "bf16", recompute=recompute, optimizer=_optimizer(policies)
                    )
                    measured["layers"] = policy.layers
                policy.settings = _with_tokens(policy.settings, tokens)
                measured[cell] = _cell(machine, policies, policy, tokens)
                print(cell, measured[cell], flush=True)  # kept if a later cell ends the process
            if policy is not None and "states" not in measured:
                measured["states"] = _require_states(policies, policy, predicted)
            del policy
    _require_cells(machine, measured)
    return measured


def profiles(machine: Machine) -> dict:
    """Nothing recomputed, packs of 16k and 32k tokens (``_fitting``): where the device's time goes
    in forward and backward, the optimizer's step, and the log-prob pass; which attention ran."""
    measured: dict[str, Any] = {}
    with one_rank(machine) as policies:
        policy = policies.random_policy(
            _model(machine, policies), "bf16", optimizer=_optimizer(policies)
        )
        measured["layers"] = policy.layers
        for tokens in sorted({_fitting(machine, 16384), _fitting(machine, 32768)}):
            policy.settings = _with_tokens(policy.settings, tokens)
            batch, loss = policies.random_batch(_lengths(tokens), policy.shape.vocab_size)
            policy.train_step(batch, loss, loss)  # kernels are prepared, Adam has its states
            seconds = _seconds(machine, lambda: policy.accumulate_gradients(batch, loss, loss))  # noqa: B023
            measured[f"{tokens} tokens"] = {
                # without the profiler, which costs the host time
                "forward_backward_seconds": seconds,
                "forward_backward": profiled(
                    machine, partial(policy.accumulate_gradients, batch, loss, loss)
                ),
                "optimizer": profiled(machine, policy.optimizer_step),
                "logprobs": profiled(machine, lambda: policy.logprobs(batch)),  # noqa: B023
            }
    return measured


def choices(machine: Machine) -> dict:
    """What is an option, or could be one, in turns with what is the default: the head in two
    passes, and one kernel for the rotary embedding that takes the angles of every token, so that
    prompts stay shared (``megatron.rope_fusion`` counts from boundaries and shares none).

    Returns:
        Seconds of forward and backward and of the log-prob pass of each way, and how far log-probs
        are from the default's, in nats.

    Raises:
        AssertionError: a way gives other log-probs than rounding makes.
    """
    tokens = _fitting(machine, 16384)
    with one_rank(machine) as policies:
        policy = policies.random_policy(
            _model(machine, policies), "bf16", max_tokens=tokens, optimizer=_optimizer(policies)
        )
        lengths = [(tokens // 16, tokens // 4 - tokens // 16)] * 4  # one prompt
        batch, loss = policies.random_batch(lengths, policy.shape.vocab_size)
        ways = {
            "default": _default,
            "head two_pass": _two_pass,
            "rotary fused, prompts shared": _rotary_of_angles,
        }
        found: dict[str, dict[str, list]] = {
            name: {"forward_backward": [], "logprobs": []} for name in ways
        }
        values: dict[str, torch.Tensor] = {}
        for _ in range(1 + _REPEATS):  # the first round prepares kernels
            for name, way in ways.items():
                with way(machine, policy):
                    values[name] = policy.logprobs(batch).logprobs_N
                    seconds = {
                        "forward_backward": _seconds(
                            machine, lambda: policy.accumulate_gradients(batch, loss, loss)
                        ),
                        "logprobs": _seconds(machine, lambda: policy.logprobs(batch)),
                    }
                for part, value in seconds.items():
                    found[name][part].append(value)
        measured: dict[str, Any] = {"layers": policy.layers, "tokens": tokens, "shared_prompts": 4}
    for name, parts in found.items():
        gap = (values[name] - values["default"]).abs().max().item()
        measured[name] = {
            f"{part}_seconds": statistics.median(times[1:]) for part, times in parts.items()
        }
        measured[name]["logprob_max_abs_nats"] = gap
        if not gap <= (0.2 if machine.on_gpu else 1e-4):  # of bf16's rounding at another place
            raise AssertionError(f"{name}: log-probs differ by {gap} nats from the default's")
    return measured


@contextmanager
def _default(machine: Machine, policy: Any) -> Iterator[None]:
    yield


@contextmanager
def _two_pass(machine: Machine, policy: Any) -> Iterator[None]:
    before = policy.settings
    policy.settings = replace(
        before, megatron=before.megatron.model_copy(update={"head": "two_pass"})
    )
    yield
    policy.settings = before


@contextmanager
def _rotary_of_angles(machine: Machine, policy: Any) -> Iterator[None]:
    """A pack as one sequence whose tokens have angles of their own; on a CPU Megatron's formula in
    that form."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import attention

    calls = []

    def fused(t_THD: torch.Tensor, angles_T1D: torch.Tensor, config: Any, **_: Any) -> torch.Tensor:
        calls.append(t_THD.shape)
        kernel = rope_utils.fused_apply_rotary_pos_emb if machine.on_gpu else _plain_rotary
        return kernel(
            t_THD.unsqueeze(1), angles_T1D.unsqueeze(1), interleaved=config.rotary_interleaved
        ).squeeze(1)

    def _plain_rotary(t: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(t, angles, rotary_interleaved=interleaved)

    with mock.patch.object(attention, "apply_rotary_pos_emb", fused):
        yield
    assert calls, "Megatron's attention takes its rotary embedding from elsewhere"


def segments(machine: Machine) -> dict:
    """A pack of 32k tokens, nothing recomputed, by an allocator whose segments grow: what it
    reserves beside what is allocated. Its process has
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (``calls``).

    Raises:
        AssertionError: it reserves more than 6 % beside, where plain segments reserved 26.
    """
    tokens = _fitting(machine, 32768)
    with one_rank(machine) as policies:
        policy = policies.random_policy(
            _model(machine, policies), "bf16", max_tokens=tokens, optimizer=_optimizer(policies)
        )
        cell = _cell(machine, policies, policy, tokens)
    measured = {"tokens": tokens, **cell}
    if "peak_reserved_bytes" in cell:
        measured["reserved_of_allocated"] = (
            cell["peak_reserved_bytes"] / cell["peak_allocated_bytes"]
        )
        if not measured["reserved_of_allocated"] <= 1.06:
            raise Partly(
                f"{measured['reserved_of_allocated']:.2f} of what is allocated is reserved",
                measured,
            )
    return measured


def host_memory(machine: Machine) -> dict:
    """A quarter of the rank's layers: states to pinned memory and back, and an update of the moving
    average of the weights (``train.enable_ema``).

    Returns:
        ``travelled_bytes``: of weights and optimizer, as gradients are dropped and made anew; GB/s
        of both ways, the first time, when host memory is pinned, and again; seconds of Adam's step,
        and of one with the average.
    """
    with one_rank(machine) as policies:
        model = _model(machine, policies)
        model = replace(model, num_hidden_layers=max(2, model.num_hidden_layers // 4))
        tokens = 4096 if machine.on_gpu else 256
        policy = policies.random_policy(
            model,
            "bf16",
            max_tokens=tokens,
            optimizer=_optimizer(policies),
            train={"enable_ema": True},
        )
        batch, loss = policies.random_batch(_lengths(tokens), policy.shape.vocab_size)
        policy.train_step(batch, loss, loss)
        states = policies.ModelStates(
            policy.models, policy.optimizer, policy.device, policy.settings.converters
        )
        travelled = sum(states.nbytes(kind) for kind in _KINDS if kind != "gradients")
        measured: dict[str, Any] = {"layers": policy.layers, "travelled_bytes": travelled}
        for time_ in ("first", "again"):
            out, back = states.offload(), states.reload()
            measured[f"{time_}_out_gb_per_second"] = travelled / 1e9 / out.seconds
            measured[f"{time_}_back_gb_per_second"] = travelled / 1e9 / back.seconds
        average = policy.average
        assert average is not None, "train.enable_ema makes an average"
        for name, kept in (("with", average), ("without", None)):
            policy.average = kept
            policy.accumulate_gradients(batch, loss, loss)
            measured[f"update_seconds_{name}_average"] = _seconds(machine, policy.optimizer_step)
        measured["parameters"] = sum(
            p.numel() for chunk in policy.chunks for p in chunk.parameters()
        )
    return measured


def adapters_of_7b(machine: Machine) -> dict:
    """Qwen2.5-7B whole on this GPU with random weights, adapters of rank 16 at all linears: memory,
    seconds of a step, and of what a weight sync exports, the adapters or the weights with them.

    Raises:
        AssertionError: more has a gradient than the adapters, or log-probs are not finite.
    """
    ready(machine)
    with one_rank(machine) as policies:
        from openrlhf_ext.megatron.layers.adapted import merged_values

        sizes = (
            (28, 3584, 28, 4, 128, 18944, 152064) if machine.on_gpu else (2, 64, 5, 1, 16, 96, 128)
        )
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        lora, tokens = policies.Adapter(16, 32.0, 0.0, names), 16384 if machine.on_gpu else 256
        policy = policies.random_policy(
            policies.Model(*sizes),
            "bf16",
            recompute=policies.RECOMPUTE["full, uniform"],
            lora=lora,
            optimizer=_optimizer(policies),
        )
        policy.settings = _with_tokens(policy.settings, tokens)
        states = policies.ModelStates(
            policy.models, policy.optimizer, policy.device, policy.settings.converters
        )
        measured: dict[str, Any] = {"layers": policy.layers, "tokens": tokens}
        measured |= _cell(machine, policies, policy, tokens)
        measured |= {f"{kind}_bytes": states.nbytes(kind) for kind in _KINDS}
        if measured["gradients_bytes"] > 0.02 * measured["parameters_bytes"] and machine.on_gpu:
            raise AssertionError(f"gradients of more than the adapters: {measured}")
        adapters = policy.trained.engine_exporter("adapter", policy.dtype, 1)
        for what, exporter in (
            ("adapters", adapters),
            ("merged", policy.exporter(merged_values(policy.chunks))),
        ):
            exported: list[int] = []
            seconds = _seconds(
                machine, lambda out=exported, of=exporter: out.extend(t.nbytes for _, t in of)
            )
            measured |= {f"export_{what}_seconds": seconds, f"export_{what}_bytes": sum(exported)}
        return measured


def _model(machine: Machine, policies: ModuleType) -> Any:
    if machine.on_gpu:
        return policies.Model(32, 5120, 5, 1, 128, 3456, 19008)
    return policies.Model(2, 64, 5, 1, 16, 96, 128)


def _fitting(machine: Machine, tokens: int) -> int:
    """Tokens of a pack of which nothing is recomputed: with 80 GB a quarter, as 32,768 take 109
    GB."""
    if not machine.on_gpu:
        return 256
    return (
        tokens
        if torch.cuda.get_device_properties(machine.device).total_memory > _LARGE_BYTES
        else tokens // 4
    )


def _optimizer(policies: ModuleType) -> Any:
    """A rate at which some steps towards nothing do not make a random model diverge."""
    return policies.Actor(adam=policies.Adam(lr=1e-6), lr_scheduler="constant")


def _with_tokens(settings: Any, tokens: int) -> Any:
    from tests.megatron.parity import micro_batches

    return replace(settings, train=micro_batches(1, tokens))


# ---- one cell


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

    # Adam makes its states in the first step
    first = _seconds(machine, lambda: policy.train_step(batch, loss, loss))
    gradients = [
        _seconds(machine, lambda: policy.accumulate_gradients(batch, loss, loss))
        for _ in range(_REPEATS)
    ]
    step = _seconds(machine, lambda: policy.train_step(batch, loss, loss))
    forward = _seconds(machine, lambda: _require_finite(policy.logprobs(batch).logprobs_N))
    flops = forward_flops(policy.shape, batch.lengths_B.tolist(), int(batch.counts_B.sum()))
    flops = replace(flops, frozen=policy.trained.is_beside_weights)
    seconds = statistics.median(gradients)
    found = {
        "first_step_seconds": first,
        "step_seconds": step,
        "forward_backward_seconds": seconds,
        "logprobs_seconds": forward,
        "model_tflop": flops.training / 1e12,
    }
    if not machine.on_gpu:
        return found
    peak = peak_tflops(torch.cuda.get_device_name())
    free, total = torch.cuda.mem_get_info()
    return found | {
        "tflops_per_second": flops.training / 1e12 / seconds,
        "mfu": None if peak is None else flops.training / 1e12 / seconds / peak,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
    }


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
        raise AssertionError(
            f"{(~torch.isfinite(logprobs_N)).sum()} of {len(logprobs_N)} log-probs are not finite"
        )


# ---- what was predicted


def _predicted_bytes(machine: Machine) -> dict[str, int]:
    """Bytes by kind of state, as ``tools.plan`` says before a run; it builds the model on the meta
    device."""
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.tools.plan.layout_proof import prove_layout
    from tests.gpu import policies

    with tempfile.TemporaryDirectory() as folder:
        model = _model(machine, policies).write(Path(folder))
        (share,) = prove_layout(
            model, ParallelLayout(1), torch.bfloat16, distributed_optimizer=True
        ).shares
    return dict(
        zip(
            _KINDS,
            (share.states.weights, share.states.gradients, share.states.optimizer),
            strict=True,
        )
    )


def _require_states(policies: ModuleType, policy: Any, predicted: dict[str, int]) -> dict:
    """Measured and predicted bytes, which may differ by what alignment takes."""
    states = policies.ModelStates(
        policy.models, policy.optimizer, policy.device, policy.settings.converters
    )
    found = {
        kind: {"bytes": states.nbytes(kind), "predicted_bytes": predicted[kind]} for kind in _KINDS
    }
    for kind, sizes in found.items():
        if abs(sizes["bytes"] - sizes["predicted_bytes"]) > 0.01 * sizes["predicted_bytes"]:
            raise AssertionError(
                f"{kind} take {sizes['bytes']} bytes, {sizes['predicted_bytes']} were predicted"
            )
    return found


def _require_cells(machine: Machine, measured: dict[str, Any]) -> None:
    if not machine.on_gpu:
        return
    kept, recomputed = (
        measured.get(f"16384 tokens, recompute {mode}", {}) for mode in ("none", "full, uniform")
    )
    if "out_of_memory" in recomputed:
        raise AssertionError(
            f"a pack of 16384 tokens does not fit with everything recomputed: {recomputed}"
        )
    key = "peak_allocated_bytes"
    if key in kept and key in recomputed and not recomputed[key] < kept[key]:
        raise AssertionError(
            f"recomputing everything saves nothing: {recomputed[key]} bytes, {kept[key]} without"
        )
