"""What a rank does with adapters, and what peft makes of the same in one process."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.megatron.built import DTYPES
from openrlhf_ext.megatron.checkpoint import load_checkpoint, take_snapshot
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layers.adapted import adapter_parameters, merged_values, rounded_adapters
from openrlhf_ext.megatron.layers.lora import LoRALayers
from openrlhf_ext.megatron.model.adapter import ALL_LINEAR, Adapter, resolved_targets
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step.optimizer import gradient_squares
from tests.megatron.parity import WeightedLogprob, deal, settings
from tests.megatron.reference import TEMPERATURE
from tests.models import unfused
from tests.patience import PATIENCE_S
from tests.sequences import plain_rows

RANK, ALPHA = 4, 6  # times 1.5: by a power of two it is all the same what is rounded


# ---- peft


def logprobs(model, batch):
    by_row = []
    for tokens, positions in plain_rows(batch):
        log_p = (model(tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        by_row.append(log_p[positions, tokens[positions + 1]])
    return torch.cat(by_row)


def truth(folder: Path, adapter: Path, batch, weights_N, targets) -> dict:
    """In fp64: log-probs, gradients, the adapter after two clipped Adam steps, merged weights; B is
    off zero, where A would have no gradient. The adapter that it began with is saved to
    ``adapter``."""
    torch.manual_seed(3)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=targets, bias="none"
    )
    # experts eager: the default, grouped_mm, does not take fp64
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(adapter)
    model = model.to(torch.float64)
    with model.disable_adapter(), torch.no_grad():
        out = {"base": logprobs(model, batch)}
    trained = {
        name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad
    }
    optimizer = torch.optim.AdamW(
        trained.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    out["norms"] = []
    for step in range(2):
        optimizer.zero_grad()
        found = logprobs(model, batch)
        (-(found * weights_N).sum()).backward()
        if step == 0:
            out |= {
                "logprobs": found.detach(),
                "grads": {n: p.grad.clone() for n, p in trained.items()},
            }
        out["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)))
        optimizer.step()
    out["adapter"] = {name: p.detach().clone() for name, p in trained.items()}
    out["merged"] = unfused(
        {name: p.detach() for name, p in model.merge_and_unload().named_parameters()}
    )
    return out


# ---- a rank


def lora_policy(case: dict, world_size: int) -> MegatronPolicy:
    """Keys besides those of ``parity.settings``: adapter (folder to start from), targets, dropout,
    seed."""
    made = settings(case, world_size)
    targets = resolved_targets(
        case.get("targets", ALL_LINEAR), read_model_shape(case["model"]).family
    )
    adapter = Adapter(case.get("rank", RANK), ALPHA, case.get("dropout", 0.0), targets)
    made = dataclasses.replace(
        made,
        converters=(
            *made.converters,
            LoRALayers(adapter, case.get("seed", 0), case.get("adapter")),
        ),
    )
    initialize_distributed(made.layout, PATIENCE_S, 1234)
    return MegatronPolicy(made)


def run_cases(cases: list[dict], batch, weights_N, root: Path) -> list[dict]:
    results = []
    for case in cases:
        policy = lora_policy(case, int(os.environ["WORLD_SIZE"]))
        if case.get("load"):
            load_checkpoint(policy, root / case["load"])
        rows = deal(case, batch, policy.shape.attention_length)
        mine, shaped = batch.select(rows), WeightedLogprob(weights_N, batch.responses).select(rows)
        results.append({"rows": rows} | _values(policy, mine, shaped, case, root))
        parallel_state.destroy_model_parallel()
    dist.barrier()
    return results


def run_others(cases: list[dict], batch, weights_N, root: Path) -> list[dict]:
    """New adapters, those with dropout, and checkpoints that are not of them: what a rank sees."""
    results = []
    for case in cases:
        policy = lora_policy(case, int(os.environ["WORLD_SIZE"]))
        if case.get("warm_up"):
            policy.warm_up()
        out: dict = {"started": _adapter(policy), "fingerprint": policy.trained.base_fingerprint()}
        if "engines" in case:
            policy.chunks[0].decoder.layers[0].mlp.linear_fc1.lora_b.data.normal_()
            sent = policy.trained.engine_exporter("adapter", DTYPES[case["engines"]], 1)
            out["sent"] = {name: tensor.clone() for name, tensor in sent}
            out["held"] = _adapter(policy)
            with rounded_adapters(policy.chunks, torch.bfloat16):
                out["rounded"] = _adapter(policy)
        rows = deal(case, batch, policy.shape.attention_length)
        mine, shaped = batch.select(rows), WeightedLogprob(weights_N, batch.responses).select(rows)
        if "load" in case:
            try:
                load_checkpoint(policy, root / case["load"])
            except CheckpointError as error:
                out["refused"] = str(error)
        if "dropout" in case:
            steps = [
                policy.train_step(mine, shaped, shaped)["grad_norm"]
                for _ in range(0 if "load" in case else 2)
            ]
            if "save" in case:
                _save(policy, root / case["save"])
            steps.append(policy.train_step(mine, shaped, shaped)["grad_norm"])
            copies = [
                (m.lora_b if m.is_row else m.lora_a).detach().clone() for m in _linears(policy)
            ]
            out |= {"steps": steps, "adapter": _adapter(policy), "copies": copies}
        elif "save" in case:
            _save(policy, root / case["save"])
        results.append(out)
        parallel_state.destroy_model_parallel()
    dist.barrier()
    return results


def dropout_masks(model: str, seed: int) -> list:
    """Of the first linear and of the last one, from a row of ones: what this rank draws."""
    policy = lora_policy(
        {"model": model, "dropout": 0.5, "seed": seed, "pp": 1}, int(os.environ["WORLD_SIZE"])
    )
    linears = [_linears(policy)[0], _linears(policy)[-1]]
    masks = []
    for linear in linears:
        width = linear.lora_a.shape[1]
        linear.lora_a.data.fill_(0.0)
        linear.lora_a.data[:, :width].copy_(torch.eye(len(linear.lora_a), width))
        linear.train()
        masks.append(linear.down(torch.ones(1, width)).detach())
    return masks


def _values(policy: MegatronPolicy, mine, shaped, case: dict, root: Path) -> dict:
    before = [parameter.detach().clone() for parameter in policy.chunks[0].parameters()]
    out: dict = {"started": _adapter(policy), "logprobs": policy.logprobs(mine).logprobs_N}
    with policy.trained.as_loaded():
        out["base"] = policy.logprobs(mine).logprobs_N
    out["again"] = torch.equal(policy.logprobs(mine).logprobs_N, out["logprobs"])
    if not case.get("distributed_optimizer") and "load" not in case:
        policy.accumulate_gradients(mine, shaped, shaped)
        out["grads"] = {n: t.clone() for n, t in policy.trained.exporter(lambda p: p.main_grad)}
        squares, present = gradient_squares(policy.models, policy.settings.layout, dist.get_rank())
        out["squares"] = float(squares.sum())
    out["steps"] = []
    for number in range(case.get("steps", 2)):
        out["steps"].append(policy.train_step(mine, shaped, shaped))
        if number == 0 and "save" in case:
            _save(policy, root / case["save"])
    out |= _what_is_kept(policy, before)
    out["adapter"] = _adapter(policy)
    out["merged"] = {n: t.clone() for n, t in policy.export(merged_values(policy.chunks))}
    if "write" in case:
        policy.save_hf(root / case["write"])
    return out


def _what_is_kept(policy: MegatronPolicy, before: list) -> dict:
    """That of the base nothing but the weights is kept, and these as they were."""
    own = {id(parameter) for parameter in adapter_parameters(policy.chunks)}
    frozen = [p for chunk in policy.chunks for p in chunk.parameters() if id(p) not in own]
    buffers = sum(buffer.grad_data.numel() for model in policy.models for buffer in model.buffers)
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    states = [
        t
        for part in parts
        for state in part.optimizer.state.values()
        for t in state.values()
        if t.numel() > 1
    ]
    named = zip(policy.chunks[0].named_parameters(), before, strict=True)
    moved = [name for (name, parameter), old in named if not torch.equal(parameter, old)]
    return {
        "base_with_gradients": sum(p.grad is not None or hasattr(p, "main_grad") for p in frozen),
        "gradient_entries": buffers,
        "adapter_entries": sum(p.numel() for p in adapter_parameters(policy.chunks)),
        "dtypes": sorted(
            {str(p.dtype) for p in adapter_parameters(policy.chunks)}
            | {str(t.dtype) for t in states}
        ),
        "state_entries": sum(t.numel() for t in states),
        "moved": [n for n in moved if "lora" not in n],
        "copies": [(m.lora_b if m.is_row else m.lora_a).detach().clone() for m in _linears(policy)],
    }


def _linears(policy: MegatronPolicy) -> list:
    return [
        m
        for chunk in policy.chunks
        for m in chunk.modules()
        if getattr(m, "adapter", None) is not None
    ]


def _adapter(policy: MegatronPolicy) -> dict:
    return {name: tensor.clone() for name, tensor in policy.trained.exporter()}


def _save(policy: MegatronPolicy, folder: Path) -> None:
    snapshot = take_snapshot(policy, copy=True)
    folder.mkdir(parents=True, exist_ok=True)
    snapshot.write(folder.parent, folder.name)
    dist.barrier()
