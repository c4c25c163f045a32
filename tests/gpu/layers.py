"""Call 2: TransformerEngine's layers against plain ones, through the policy.

Where there is no TransformerEngine the same checks hold the plain layers in fp32 against
themselves: packed against one at a time, recomputed against kept, four micro-batches against one,
Adam against its formula. What then is left to fail is our own code, not TransformerEngine's.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import fields
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gpu.kernels import attention_backend
from tests.gpu.kit import Machine, NotHere
from tests.gpu.one_rank import one_rank

# prompt and response of each sequence: odd lengths, one token, a long one
_LENGTHS = [(17, 300), (5, 1), (100, 900), (1, 64), (64, 1983), (250, 7), (33, 512), (100, 128)]
_TINY_LENGTHS = [(4, 9), (3, 1), (1, 14), (2, 5), (9, 3), (5, 7), (4, 4), (9, 20)]


def parity(machine: Machine) -> dict:
    """Log-probs and all gradients of a pack, head sizes 64 and 128, grouped heads, every way to
    recompute."""
    measured: dict[str, Any] = {}
    attention: dict[str, Any] = {}
    with one_rank(machine) as policies:
        for head_dim in (64, 128):
            model = _model(machine, policies, head_dim)
            batch, loss = _batch(machine, policies, model)
            reference = _outcome(policies, model, "fp32", batch, loss, plain=True)
            allowed, result = policies.EXACT, {}
            if machine.on_gpu:
                plain = _outcome(policies, model, "bf16", batch, loss, plain=True)
                result["plain in bf16"] = policies.differences(plain, reference)
                allowed = policies.as_good_as(result["plain in bf16"])
            together = int(batch.lengths_B.sum())
            for mode, recompute in policies.RECOMPUTE.items():
                arguments = {"recompute": recompute, "max_tokens": together}
                found = _outcome(policies, model, _dtype(machine), batch, loss, **arguments)
                result[mode] = policies.differences(found, reference)
                policies.require(result[mode], allowed, f"head size {head_dim}, recompute {mode}")
            measured[f"head size {head_dim}"] = result
            attention[f"head size {head_dim}"] = attention_backend(())["transformer_engine"]
    return measured if not machine.on_gpu else measured | {"attention": attention}


def mixture(machine: Machine) -> dict:
    """Log-probs and all gradients of a mixture of experts, TransformerEngine's grouped linears
    against plain ones in fp32, with given experts: routers' own choices differ by rounding. The
    same bits once more, its own choices too."""
    measured: dict[str, Any] = {}
    with one_rank(machine) as policies:
        dense = _model(machine, policies, 128)
        model = policies.Mixture(*(getattr(dense, field.name) for field in fields(dense)))
        drawn, loss = _batch(machine, policies, model)
        batch = drawn.with_experts(_drawn_experts(model, drawn.lengths_B.tolist()))
        reference, together = (
            _outcome(policies, model, "fp32", batch, loss, plain=True),
            int(batch.lengths_B.sum()),
        )
        allowed = policies.EXACT
        if machine.on_gpu:
            plain = _outcome(policies, model, "bf16", batch, loss, plain=True)
            measured["plain in bf16"] = policies.differences(plain, reference)
            allowed = policies.as_good_as(measured["plain in bf16"])
        again = {"recompute": "selective", "recompute_modules": ("moe",)}
        for mode, recompute in {"none": {}, "moe": again, "full": {"recompute": "full"}}.items():
            arguments = {"recompute": recompute, "max_tokens": together}
            found = _outcome(policies, model, _dtype(machine), batch, loss, **arguments)
            measured[mode] = policies.differences(found, reference)
            policies.require(measured[mode], allowed, f"recompute {mode}")
        policy = _policy(machine, policies, model, max_tokens=together)
        for what, each in {"given experts": batch, "experts of its own": drawn}.items():
            first_N, second_N = (policy.logprobs(each).logprobs_N for _ in range(2))
            if not torch.equal(first_N, second_N):
                gap = (first_N - second_N).abs().max().item()
                raise AssertionError(
                    f"{what}: two passes of the same weights differ by up to {gap:g} nats"
                )
    return measured


def _drawn_experts(model: Any, lengths: list[int]) -> list[np.ndarray]:
    """By place: sequences with the same prompt share what is computed of it."""
    draws = np.random.default_rng(3).random(
        (max(lengths), model.num_hidden_layers, model.num_experts)
    )
    experts = draws.argsort(-1)[..., : model.num_experts_per_tok].astype(np.uint8)
    return [experts[: length - 1] for length in lengths]


def adapters(machine: Machine) -> dict:
    """Log-probs and all gradients of adapters, with and without recomputation; without them the
    base's bits; memory."""
    measured: dict[str, Any] = {}
    with one_rank(machine) as policies:
        model = _model(machine, policies, 128)
        batch, loss = _batch(machine, policies, model)
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        lora, together = policies.Adapter(16, 32.0, 0.0, names), int(batch.lengths_B.sum())
        reference = _outcome(policies, model, "fp32", batch, loss, plain=True, lora=lora)
        allowed = policies.EXACT
        if machine.on_gpu:
            plain = _outcome(policies, model, "bf16", batch, loss, plain=True, lora=lora)
            measured["plain in bf16"] = policies.differences(plain, reference)
            allowed = policies.as_good_as(measured["plain in bf16"])
        for mode in ("none", "full, uniform"):
            policies.empty_device()
            arguments = {"recompute": policies.RECOMPUTE[mode], "max_tokens": together}
            policy = _policy(machine, policies, model, lora=lora, **arguments)
            measured[mode] = policies.differences(policies.outcome(policy, batch, loss), reference)
            policies.require(measured[mode], allowed, f"recompute {mode}")
            measured[f"{mode}: entries"] = _only_adapters(policy)
            before, logprobs_N = _bytes(policy), policy.logprobs(batch).logprobs_N
            with policy.trained.as_loaded():
                base_N = policy.logprobs(batch).logprobs_N
            policy.train_step(batch, loss, loss)
            with policy.trained.as_loaded():
                again_N = policy.logprobs(batch).logprobs_N
            if torch.equal(logprobs_N, base_N) or not torch.equal(base_N, again_N):
                raise AssertionError("adapters that are off count, or a step has moved the base")
            after = _bytes(policy)
            moved = {
                name
                for name in before
                if "lora" not in name and not torch.equal(before[name], after[name])
            }
            if moved := {name for name in moved if not name.startswith("state")}:
                raise AssertionError(f"a step moved {sorted(moved)}")
    return measured


def _only_adapters(policy: Any) -> dict:
    """Entries of gradient buffers and of adapters, which are the same."""
    gradients = sum(buffer.grad_data.numel() for model in policy.models for buffer in model.buffers)
    found = [p.numel() for name, p in policy.chunks[0].named_parameters() if "lora" in name]
    if not sum(found) <= gradients <= 1.01 * sum(found) + 4096:
        raise AssertionError(f"{gradients} gradients of {sum(found)} entries of adapters")
    return {"gradients": gradients, "adapters": sum(found)}


def training(machine: Machine) -> dict:
    """Gradients added up within the products over four micro-batches; states away in host memory
    and back."""
    measured: dict[str, Any] = {}
    with one_rank(machine) as policies:
        model = _model(machine, policies, 128)
        batch, loss = _batch(machine, policies, model)
        quarter = len(batch) // 4
        reference = _outcome(
            policies, model, "fp32", batch, loss, plain=True, micro_batch_size=len(batch)
        )
        policy = _policy(machine, policies, model, micro_batch_size=quarter)
        fusing = [
            module
            for module in policy.chunks[0].modules()
            if hasattr(module, "fuse_wgrad_accumulation")
        ]
        if machine.on_gpu and not (
            fusing and all(module.fuse_wgrad_accumulation for module in fusing)
        ):
            raise AssertionError(
                f"the policy leaves weight gradients unfused, or cannot fuse them: {len(fusing)} "
                "can"
            )
        found = policies.outcome(policy, batch, loss)
        measured["four micro-batches"] = policies.differences(found, reference)
        measured["modules_that_fuse"] = len(fusing)
        allowed = policies.EXACT
        if machine.on_gpu:
            for module in fusing:
                module.fuse_wgrad_accumulation = False
            unfused = policies.outcome(policy, batch, loss)
            measured["four micro-batches, unfused"] = policies.differences(unfused, reference)
            # unfused gradients are rounded to bf16 once per micro-batch: fused ones must not be
            # worse
            allowed = policies.as_good_as(measured["four micro-batches, unfused"])
            for module in fusing:
                module.fuse_wgrad_accumulation = True
        policies.require(measured["four micro-batches"], allowed, "four micro-batches")
        measured["offload"] = _offload(policies, policy, batch, loss)
    return measured


def waits(machine: Machine) -> dict:
    """The host does not wait for the device in forward, backward and log-prob pass where packs
    share prompts, with and without adapters; ``waits.micro_batches`` holds every estimator to it,
    on plain layers."""
    measured: dict[str, Any] = {"mode": "error" if machine.on_gpu else "none on a CPU"}
    with one_rank(machine) as policies:
        # Megatron comes with it: see ``one_rank``
        from tests.gpu.waits import Unwaiting, the_mode_works

        if machine.on_gpu:
            the_mode_works(machine.device)
        model = _model(machine, policies, 64)
        batch, loss = policies.random_batch(
            [(40, 60), (40, 9), (40, 84), (7, 30)], model.vocab_size
        )
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        kind = type("UnwaitingRandomPolicy", (Unwaiting, policies.RandomPolicy), {})
        for name, lora in (
            ("all weights", None),
            ("adapters", policies.Adapter(16, 32.0, 0.0, names)),
        ):
            policy = _policy(machine, policies, model, lora=lora, kind=kind, max_tokens=1024)
            for strict in (False, True):  # the first of each kernel may wait, to compile
                policy.strict = strict
                try:
                    policy.accumulate_gradients(batch, loss, loss)
                    policy.logprobs(batch)
                except RuntimeError as error:
                    if "synchronizing" not in str(error):
                        raise
                    raise AssertionError(
                        f"{name}: the host waits for the device in the micro-batches"
                    ) from error
            measured[name] = policy.layers
    return measured


def optimizer(machine: Machine) -> dict:
    """Five steps of the Adam that the policy picks, on given gradients, against the formula in
    fp64; on a GPU torch's too; and with its states in host memory, in blocks that end anywhere, to
    the last bit."""
    measured: dict[str, Any] = {}
    with one_rank(machine) as policies:
        model = _model(machine, policies, 64)
        adam = policies.Adam(lr=1e-3, weight_decay=0.1)
        settings = policies.Actor(adam=adam, max_norm=0.0, lr_scheduler="constant")
        # bf16: with fp32 master weights
        picked = policies.random_policy(model, "bf16", optimizer=settings)
        _require_layers(machine.on_gpu, picked)
        measured["picked"] = _adam_steps(policies, picked, adam)
        states = policies.optimizer_states(picked)
        with policies.blocks_of(10_007):
            streamed = policies.random_policy(model, "bf16", optimizer=settings, adam_offload=True)
            _adam_steps(policies, streamed, adam)
        found = policies.optimizer_states(streamed)
        wrong = [name for name, tensor in states.items() if not torch.equal(tensor, found[name])]
        if wrong or found.keys() != states.keys():
            raise AssertionError(
                f"with its states in host memory Adam gives other bits: {wrong[:3]} of "
                f"{len(states)}"
            )
        if machine.on_gpu:
            if measured["picked"]["class"] != "FusedAdam":
                raise AssertionError(
                    f"the policy picks {measured['picked']['class']}, not TransformerEngine's Adam"
                )
            with policies.torch_optimizer():
                other = policies.random_policy(model, "bf16", optimizer=settings)
            measured["torch"] = _adam_steps(policies, other, adam)
    for name, result in measured.items():
        # fp32 rounds weights below 1 by up to 6e-8 a step
        if not result["weight_max_abs_difference"] <= 1e-6:
            raise AssertionError(f"Adam ({name}) is not its formula: {result}")
    return measured


def shapes(machine: Machine) -> dict:
    """Time and memory of fifty packs of different shapes, first and again: what kernels prepare for
    every shape."""
    first_until = time.monotonic() + 0.4 * machine.seconds  # the second pass takes no longer
    rows, again, moved = [], [], []
    with one_rank(machine) as policies:
        model = _model(machine, policies, 128)
        most = 16384 if machine.on_gpu else 96
        policy = _policy(machine, policies, model, max_tokens=2 * most)
        packs = [
            _pack(policies, model, number, most) for number in range(50 if machine.on_gpu else 6)
        ]
        used = [_used_bytes(machine)]
        for batch, loss in packs:
            rows.append(_timed(machine, policy, batch, loss))
            if time.monotonic() > first_until:
                break
        used.append(_used_bytes(machine))
        for (batch, loss), first in zip(packs, rows, strict=False):
            again.append(_timed(machine, policy, batch, loss))
            moved.append((again[-1]["logprobs_N"] - first["logprobs_N"]).abs().max().item())
            if not moved[-1] <= 0.05:  # more than kernels that add in another order can do
                raise AssertionError(
                    f"a pack of {batch.lengths_B.tolist()} differs by {moved[-1]} nats the "
                    "second time"
                )
        used.append(_used_bytes(machine))
    grown = [after - before for before, after in zip(used, used[1:], strict=False)]
    if grown[1] > 64 << 20:
        raise AssertionError(
            f"packs that had been seen before took {grown[1] / 2**20:.0f} MiB more of the device"
        )
    return {
        "packs": len(rows),
        "tokens_of_a_pack_at_most": most,
        "first_seconds_median": statistics.median(row["seconds"] for row in rows),
        "first_seconds_max": max(row["seconds"] for row in rows),
        "again_seconds_median": statistics.median(row["seconds"] for row in again),
        "again_seconds_max": max(row["seconds"] for row in again),
        "first_pass_grew_bytes": grown[0],
        "second_pass_grew_bytes": grown[1],
        "pack_peak_bytes_max": max(row["peak_bytes"] for row in rows),
        "logprob_max_abs_nats_again": max(moved),
        "packs_not_bit_equal_again": sum(gap > 0 for gap in moved),
    }


def rope(machine: Machine) -> dict:
    """How far the fused rotary embedding (megatron.rope_fusion) moves log-probs; decides nothing by
    itself."""
    machine.need_gpu("TransformerEngine's fused rotary embedding")
    measured: dict[str, Any] = {}
    with one_rank(machine) as policies:
        model = _model(machine, policies, 128)
        batch, loss = policies.random_batch([(64, 8128), (100, 3996), (32, 480)], model.vocab_size)
        reference = _outcome(policies, model, "fp32", batch, loss, plain=True)
        off = _outcome(policies, model, "bf16", batch, loss)
        on = _outcome(policies, model, "bf16", batch, loss, rope_fusion=True)
        measured["off against fp32"] = policies.differences(off, reference)
        measured["on against fp32"] = policies.differences(on, reference)
        measured["on against off"] = policies.differences(on, off)
        policies.require(
            measured["on against fp32"],
            policies.as_good_as(measured["off against fp32"]),
            "rope fusion",
        )
    return measured


# ---- policies


def _model(machine: Machine, policies: ModuleType, head_dim: int) -> Any:
    """Four query heads for every key-value head."""
    if machine.on_gpu:
        return policies.Model(4, 1024, 2048 // head_dim, 512 // head_dim, head_dim, 2816, 8192)
    return policies.Model(2, 64, 4, 1, head_dim, 96, 61)


def _batch(machine: Machine, policies: ModuleType, model: Any) -> Any:
    return policies.random_batch(_LENGTHS if machine.on_gpu else _TINY_LENGTHS, model.vocab_size)


def _dtype(machine: Machine) -> str:
    return "bf16" if machine.on_gpu else "fp32"


def _policy(machine: Machine, policies: ModuleType, model: Any, **arguments: Any) -> Any:
    policy = policies.random_policy(model, _dtype(machine), **arguments)
    _require_layers(machine.on_gpu, policy)
    return policy


def _require_layers(wanted: bool, policy: Any) -> None:
    if wanted and policy.layers != "TransformerEngine":
        raise NotHere(
            "TransformerEngine is not on the path: the check build of call 2 makes it, or a "
            "bundle brings it"
        )


def _outcome(
    policies: ModuleType,
    model: Any,
    dtype: str,
    batch: Any,
    loss: Any,
    plain=False,
    **arguments: Any,
) -> Any:
    policies.empty_device()
    policy = policies.random_policy(model, dtype, plain=plain, **arguments)
    _require_layers(dtype == "bf16" and not plain, policy)
    return policies.outcome(policy, batch, loss)


# ---- offload


def _offload(policies: ModuleType, policy: Any, batch: Any, loss: Any) -> dict:
    """After a step: everything away and back, bit for bit, and another step."""
    policy.train_step(batch, loss, loss)
    states = policies.ModelStates(
        policy.models, policy.optimizer, policy.device, policy.settings.converters
    )
    before, logprobs_N = _bytes(policy), policy.logprobs(batch).logprobs_N
    away = states.offload()
    back = states.reload()
    different = [
        name for name, value in _bytes(policy).items() if not torch.equal(value, before[name])
    ]
    if different:
        raise AssertionError(
            f"not what they were after the way to host memory and back: {different}"
        )
    if not torch.equal(policy.logprobs(batch).logprobs_N, logprobs_N):
        raise AssertionError(
            "the same weights give other log-probs after the way to host memory and back"
        )
    policy.train_step(batch, loss, loss)
    if all(torch.equal(value, before[name]) for name, value in _bytes(policy).items()):
        raise AssertionError("a step after the way to host memory and back changes nothing")
    gib = away.moved_bytes / 2**30
    return {
        "moved_bytes": away.moved_bytes,
        "freed_bytes": away.measured_bytes,
        "out_gib_per_second": gib / away.seconds,
        "back_gib_per_second": gib / back.seconds,
    }


def _bytes(policy: Any) -> dict[str, Tensor]:
    """Copies of the weights and of Adam's states in host memory, as bytes."""
    tensors = {name: parameter.data for name, parameter in policy.chunks[0].named_parameters()}
    for index, part in enumerate(
        getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    ):
        values = (value for state in part.optimizer.state.values() for value in state.values())
        tensors |= {
            f"state {index}.{i}": value for i, value in enumerate(values) if torch.is_tensor(value)
        }
    return {
        name: value.cpu().contiguous().reshape(-1).view(torch.uint8).clone()
        for name, value in tensors.items()
    }


# ---- Adam


def _adam_steps(policies: ModuleType, policy: Any, settings: Any) -> dict:
    """Steps with random gradients; the master weights against the formula."""
    parameters = dict(policy.chunks[0].named_parameters())
    weights = {name: parameter.detach().double() for name, parameter in parameters.items()}
    start = {name: weight.clone() for name, weight in weights.items()}
    moments = {
        name: (torch.zeros_like(weight), torch.zeros_like(weight))
        for name, weight in weights.items()
    }
    for step in range(1, 6):
        policy.zero_grad()
        for name, parameter in parameters.items():
            parameter.main_grad.copy_(policies.drawn(name, parameter, draw=step))
            moments[name] = adam(
                weights[name], *moments[name], parameter.main_grad.double(), step, settings
            )
        policy.optimizer_step()
    gaps, moved = 0.0, 0.0
    for name, parameter in parameters.items():
        master = getattr(parameter, "main_param", None)
        master = (parameter if master is None else master).detach().double().view(parameter.shape)
        gaps = max(gaps, (master - weights[name]).abs().max().item())
        moved = max(moved, (master - start[name]).abs().max().item())
    inner = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])[0].optimizer
    return {
        "class": type(inner).__name__,
        "weight_max_abs_difference": gaps,
        "weight_max_abs_change": moved,
    }


def adam(
    weight: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, step: int, settings: Any
) -> tuple[Tensor, Tensor]:
    """One update of ``weight`` in place, decay decoupled and not of vectors; the new moments."""
    first, second = settings.betas
    mean, square = (
        first * mean + (1 - first) * gradient,
        second * square + (1 - second) * gradient**2,
    )
    if weight.dim() > 1:
        weight.mul_(1 - settings.lr * settings.weight_decay)
    direction = mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + settings.eps)
    weight.sub_(settings.lr * direction)
    return mean, square


# ---- shapes


def _pack(policies: ModuleType, model: Any, number: int, most: int) -> Any:
    """Between one and sixteen sequences of together at most ``most`` tokens."""
    generator = torch.Generator().manual_seed(number)
    shares = torch.rand(1 + number % 16, generator=generator) + 0.1
    filled = most * (0.25 + 0.75 * torch.rand((), generator=generator))
    lengths = [max(3, int(length)) for length in (shares / shares.sum() * filled).tolist()]
    return policies.random_batch(
        [(max(1, n // 8), n - max(1, n // 8)) for n in lengths], model.vocab_size
    )


def _timed(machine: Machine, policy: Any, batch: Any, loss: Any) -> dict:
    if machine.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    logprobs_N = policy.logprobs(batch).logprobs_N
    policy.accumulate_gradients(batch, loss, loss)
    if machine.on_gpu:
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if machine.on_gpu else 0
    return {"seconds": time.perf_counter() - started, "peak_bytes": peak, "logprobs_N": logprobs_N}


def _used_bytes(machine: Machine) -> int:
    """Of the device, by everything; on a CPU nobody counts."""
    if not machine.on_gpu:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
