"""Exact mode, for call 6: do its operations give a row the same bits in any batch, and has the
policy the engine's log-probs to the last bit?

In the order in which one failure explains the next: ``norms``, ``products``, ``attention``,
``policy_and_engine``. On a CPU they are the operations of its own table. Policy and engine never
share a process: ``python -m tests.gpu.exactness MODEL FILE`` is the engine. Shape suffixes as in
``openrlhf_ext.exact.operations``; T = tokens of a text, N = tokens of all, L = positions of one
sequence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf_ext.exact import LEAST_QUERIES
from openrlhf_ext.exact.operations import Operations
from openrlhf_ext.exact.walk import (
    States,
    engine_modules,
    policy_modules,
    recorded,
)
from openrlhf_ext.megatron.layers.exact import ExactLayers, device_operations
from tests.gpu.kit import Machine, Partly
from tests.gpu.runs import REAL_MODEL, ROOT, Runs, real_checkpoint, report

_PROMPT, _LONGEST = 12, 512  # tokens
_EPS = 1e-6
_ALONE = 64  # rows of a batch that are computed one by one
Batch = Callable[[Tensor], Tensor]
"""Computes rows."""


# ---- operations


@dataclass(frozen=True)
class Difference:
    """``share`` of the values of a module's states that are other bits, and ``largest`` distance.
    0 and infinity: the shapes differ."""

    name: str
    share: float
    largest: float


def norms(machine: Machine) -> dict:
    """Norms of embeddings and of sums for 255, 256, and more rows against each row alone; on a GPU
    also of a policy's sum against an engine's branch and stream.

    Raises:
        Partly: rows differ.
    """
    table, draw = _table(machine)
    found = {}
    for width in (3584, 896, 128) if machine.on_gpu else (896, 128):
        stream_MK, branch_MK, weight_K = draw(600, width), draw(600, width), draw(width)
        sum_MK = table.add(stream_MK, branch_MK)
        norm = partial(table.norm, weight_K=weight_K, eps=_EPS)
        of_sum, of_other = partial(norm, of_sum=True), partial(norm, of_sum=False)
        found |= _by_rows(f"sums of {width}", of_sum, sum_MK, (255, 256, 600))
        found |= _by_rows(f"embeddings of {width}", of_other, stream_MK, (255, 256, 600))
        if machine.on_gpu:
            from vllm import _custom_ops

            normed, stream = branch_MK.clone(), stream_MK.clone()
            _custom_ops.fused_add_rms_norm(normed, stream, weight_K, _EPS)
            found[f"sum and zeros of {width}"] = _rows(of_sum(sum_MK), normed)
            found[f"stream of {width}"] = _rows(sum_MK, stream)
    return _all_equal(machine, found)


def products(machine: Machine) -> dict:
    """Linear layers, with and without bias, and the head for 1 to 4,096 rows against each row
    alone.

    Raises:
        Partly: rows differ.
    """
    table, draw = _table(machine)
    sizes = (1, 2, 15, 16, 64, 255, 256, 1000, 4096) if machine.on_gpu else (1, 4, 31, 33, 100)
    shapes = ((3584, 4608), (896, 151_936), (2048, 4096)) if machine.on_gpu else ((96, 200),)
    found = {}
    for inputs, outputs in shapes:
        x_MK, weight_NK = draw(sizes[-1], inputs), draw(outputs, inputs)
        for name, compute in _products(table, weight_NK, draw(outputs)).items():
            found |= _by_rows(f"{name} of {inputs} to {outputs}", compute, x_MK, sizes)
    return _all_equal(machine, found)


def _products(table: Operations, weight_NK: Tensor, bias_N: Tensor) -> dict[str, Batch]:
    product, head = table.product(weight_NK), table.head_product(weight_NK)
    return {
        "linear": lambda x: product(x, None),
        "with bias": lambda x: product(x, bias_N),
        "head": lambda x: table.logits(x, head),
    }


def attention(machine: Machine) -> dict:
    """A pack against each of its sequences alone; on a GPU also against tokens that are generated
    one by one, as an exact engine does it, and, only reported, as any engine does it.

    Raises:
        Partly: tokens differ.
    """
    table, draw = _table(machine)
    found, others = {}, {}
    lengths = (700, 1, 130, 37) if machine.on_gpu else (70, 1, 13)
    for size in (64, 128) if machine.on_gpu else (32, 64):  # the bundle's vLLM has only these
        attend = partial(_attention, table, scale=size**-0.5)
        pack = [draw(sum(lengths), heads, size) for heads in (4, 2, 2)]
        whole = attend(pack, lengths)
        parts = [*zip(*(x.split(lengths) for x in pack), strict=True)]
        alone = torch.cat([attend(part, [len(part[0])]) for part in parts])
        found[f"alone, {size}"] = _rows(alone, whole)
        if machine.on_gpu:
            first = whole[: lengths[0]]
            generated = partial(_generated, table, parts[0], size**-0.5)
            found[f"generated, {size}"] = _rows(generated(LEAST_QUERIES), first)
            others[f"generated by any engine, {size}"] = _rows(generated(1), first)
    return _all_equal(machine, found, others)


def _attention(
    table: Operations, pack: Sequence[Tensor], lengths: Sequence[int], scale: float
) -> Tensor:
    query, key, value = pack
    starts = torch.tensor([0, *lengths], device=query.device).cumsum(0).int()
    return table.attention(query, key, value, starts, scale)


def _generated(table: Any, sequence: Sequence[Tensor], scale: float, longest: int) -> Tensor:
    """(L, Q, D) each token as a request of its own, with the tokens before it in pages."""
    from openrlhf_ext.exact.gpu import fill_pages

    query, key, value = sequence
    each = torch.arange(len(query) + 1, device=query.device, dtype=torch.int32)
    keys, values, table_1P = fill_pages(key, value, each[[0, -1]])
    pages = keys, values, table_1P.expand(len(query), -1).contiguous()
    return table.over_pages(query, pages, each, each[1:], longest, scale)


def _table(machine: Machine) -> tuple[Operations, Callable[..., Tensor]]:
    """The operations in a rank's environment, and what draws bf16 numbers."""
    os.environ |= ExactLayers(_LONGEST).environment()
    torch.set_num_threads(1)
    generator = torch.Generator(machine.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=machine.device).bfloat16()

    return device_operations(), draw


def _by_rows(name: str, compute: Batch, x_MK: Tensor, sizes: tuple[int, ...]) -> dict[str, int]:
    """For batches of the first rows: how many are other bits than alone."""
    picked = torch.linspace(0, len(x_MK) - 1, _ALONE, device=x_MK.device).long().unique()
    alone = torch.cat([compute(x_MK[row : row + 1]) for row in picked.tolist()])
    found = {}
    for size in sizes:
        inside = picked < size
        found[f"{name}, {size} rows"] = _rows(compute(x_MK[:size])[picked[inside]], alone[inside])
    return found


def _rows(one: Tensor, other: Tensor) -> int:
    return int(different(one, other).flatten(1).any(1).sum())


def _all_equal(machine: Machine, found: dict[str, int], others: dict | None = None) -> dict:
    measured = report(
        machine, {"different_rows": found, **(others or {})}, ["batch-invariant kernels"]
    )
    if wrong := {name: count for name, count in found.items() if count}:
        raise Partly(f"rows that are other bits in another batch: {wrong}", measured)
    return measured


# ---- policy and engine


def policy_and_engine(machine: Machine) -> dict:
    """Log-probs of 10,000 sampled tokens (256 on a CPU), and every module's output for one text.

    Returns:
        For the policy, and for the engine's own second computation of the same tokens as a prompt:
        for how many tokens the log-prob has other bits, and how far, in nats. The modules that
        differ; the first one.

    Raises:
        Partly: the policy's log-probs differ from the engine's.
    """
    with Runs.open(machine, "exactness") as runs:
        model = real_checkpoint(runs.folder) if os.environ.get(REAL_MODEL) else runs.policy
        engine = _engine(machine, model, runs.folder / "engine.pt")
        logprobs_N, states = _policy(machine, model, engine["tokens"])
    sampled_N = torch.tensor([value for row in engine["sampled"] for value in row])
    again_N = torch.tensor([value for row in engine["as_prompt"] for value in row])
    modules = [each for each in differences(states, engine["states"]) if each.largest > 0]
    found = {
        "policy": _apart(logprobs_N, sampled_N),
        "engine_as_prompt": _apart(again_N, sampled_N),
        "modules": len(engine["states"]),
        "different_modules": [asdict(each) for each in modules],
        "first_difference": modules[0].name if modules else None,
        "attention": engine["attention"],
        "flash_attention_version": engine["flash_attention_version"],
        "runner": engine["runner"],
    }
    measured = report(machine, found, ["batch-invariant operations", "10,000 tokens"])
    if wrong := found["policy"]["different"]:
        where = found["first_difference"] or "the head, softmax, or a generated token's attention"
        raise Partly(
            f"{wrong} of {len(sampled_N)} log-probs have other bits; first: {where}", measured
        )
    return measured


def _apart(one_N: Tensor, other_N: Tensor) -> dict[str, Any]:
    gaps_N = (one_N.double() - other_N.double()).abs()
    return {
        "tokens": len(gaps_N),
        "different": int((one_N.view(torch.int32) != other_N.view(torch.int32)).sum()),
        "max_abs_nats": gaps_N.max().item(),
        "mean_abs_nats": gaps_N.mean().item(),
    }


def _policy(machine: Machine, model: Path, texts: list[list[int]]) -> tuple[Tensor, States]:
    """(N,) log-probs of all tokens behind the prompts, and the first text's states."""
    import numpy as np

    from openrlhf_ext.megatron.step.batch import sequence_batch
    from tests.gpu.alone import build

    def batch(rows: list[list[int]]) -> Any:
        return sequence_batch(
            [np.array(row, dtype=np.int32) for row in rows], [[(_PROMPT, len(row))] for row in rows]
        )

    _table(machine)
    case = {"model": str(model), "dtype": "bf16", "converters": (ExactLayers(_LONGEST),)}
    policy = build(case)
    with recorded(policy_modules(policy.chunks[0])) as states:
        policy.logprobs(batch(texts[:1]), temperature=1.0)
    return policy.logprobs(batch(texts), temperature=1.0).logprobs_N.float().cpu(), states


def _engine(machine: Machine, model: Path, file: Path) -> dict[str, Any]:
    """What ``main`` has written."""
    from openrlhf_ext.rollout.launch import engine_env, exact_env

    on_gpu = machine.on_gpu
    own = engine_env(use_gpu=on_gpu, model_path=str(model), batch_invariant=True)
    command = [sys.executable, "-m", "tests.gpu.exactness", str(model), str(file)]
    environment = os.environ | own | exact_env(on_gpu)
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return torch.load(file, weights_only=False)


def main(model: Path, file: Path) -> None:
    """Samples, scores the same tokens as prompts, and records one text's modules."""
    from openrlhf_ext import patches
    from openrlhf_ext.exact import engine as exact_engine
    from tests.gpu.engine_alone import names, runner_of, start

    patches.apply()
    exact_engine.install()
    machine = Machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), None, 0.0)
    backend = {"attention_backend": "FLASH_ATTN"} if machine.on_gpu else {}
    llm = start(machine, model, enforce_eager=True, **backend)
    from vllm import SamplingParams

    rows, length = (160, 64) if machine.on_gpu else (16, 16)
    prompts = [[5 + (7 * row + place) % 200 for place in range(_PROMPT)] for row in range(rows)]
    sampled = SamplingParams(
        max_tokens=length, logprobs=0, temperature=1.0, seed=7, ignore_eos=True
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampled, use_tqdm=False
    )
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    tokens = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
    again = llm.generate([{"prompt_token_ids": text} for text in tokens], scored, use_tqdm=False)
    with recorded(engine_modules(runner_of(llm).get_model())) as states:
        alone = SamplingParams(max_tokens=1, temperature=1.0)
        llm.generate([{"prompt_token_ids": tokens[0]}], alone, use_tqdm=False)
    found = {
        "tokens": tokens,
        **names(llm),
        "states": {name: state[: len(tokens[0])] for name, state in states.items()},
        "sampled": [
            _logprobs(output.outputs[0].logprobs, row)
            for output, row in zip(outputs, answers, strict=True)
        ],
        "as_prompt": [
            _logprobs(output.prompt_logprobs[_PROMPT:], row)
            for output, row in zip(again, answers, strict=True)
        ],
    }
    torch.save(found, file)


def _logprobs(entries: Any, tokens: list[int]) -> list[float]:
    return [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]


def differences(policy: Mapping[str, Tensor], engine: Mapping[str, Tensor]) -> list[Difference]:
    """Of every module that both have recorded, in the engine's order."""
    return [
        _difference(name, policy[name], state) for name, state in engine.items() if name in policy
    ]


def _difference(name: str, policy: Tensor, engine: Tensor) -> Difference:
    if policy.shape != engine.shape:
        return Difference(name, 0.0, torch.inf)
    if (share := different(policy, engine).double().mean().item()) == 0.0:
        return Difference(name, 0.0, 0.0)
    return Difference(name, share, (policy.double() - engine.double()).abs().max().item())


def different(one: Tensor, other: Tensor) -> Tensor:
    """Booleans: where two tensors of floating-point numbers have other bits. Zeros of both signs
    are one number, and a NaN is another one than itself."""
    return one != other


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
