"""How far a policy rank is from computing an engine's log-probs to the last bit, and where the two
part, for call 6.

The policy is bf16 on plain layers, on a GPU with vLLM's batch-invariant operations in its process
too, beside an engine with VLLM_BATCH_INVARIANT=1 (vllm 0.32.0
model_executor/determinism/batch_invariant.py). The two never share a process:
``python -m tests.gpu.exactness MODEL FILE`` is the engine. Shape suffixes: T = tokens of a text, N
= tokens of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.gpu.kit import Machine
from tests.gpu.runs import REAL_MODEL, ROOT, Runs, real_checkpoint, report

_INVARIANT = "VLLM_BATCH_INVARIANT"
_PROMPT = 12  # tokens
Meant = Callable[[tuple, Any], Tensor]
"""What of a module's inputs and output is looked at."""
Modules = Iterator[tuple[str, torch.nn.Module, Meant]]
States = dict[str, Tensor]
"""(T, ...) outputs of modules for one text, by name, in the order of computation."""


def first_look(machine: Machine) -> dict:
    """Log-probs of 10,000 sampled tokens (256 on a CPU), and every module's output for one text.

    Returns:
        For the policy, and for the engine's own second computation of the same tokens as a prompt:
        for how many tokens the log-prob is another number, and how far, in nats. For every module
        in order: the share of values that are others, and the largest difference; and the first
        module with any.

    Raises:
        AssertionError: the two do not compute the same model: log-probs differ by more than
        rounding explains.
    """
    with Runs.open(machine, "exactness") as runs:
        model = real_checkpoint(runs.folder) if os.environ.get(REAL_MODEL) else runs.policy
        engine = _engine(machine, model, runs.folder / "engine.pt")
        if machine.on_gpu:
            _be_batch_invariant()
        logprobs_N, states = _policy(model, engine["tokens"])
    sampled_N = torch.tensor([value for row in engine["sampled"] for value in row])
    again_N = torch.tensor([value for row in engine["as_prompt"] for value in row])
    modules = [_difference(name, states[name], value) for name, value in engine["states"].items()]
    found = {
        "policy": _apart(logprobs_N, sampled_N),
        "engine_as_prompt": _apart(again_N, sampled_N),
        "policy_to_engine_as_prompt": _apart(logprobs_N, again_N),
        "modules": modules,
        "first_difference": next(
            (module["name"] for module in modules if module["different_share"] > 0), None
        ),
        "attention": engine["attention"],
        "runner": engine["runner"],
    }
    if not found["policy"]["mean_abs_nats"] < 0.1:
        raise AssertionError(f"policy and engine do not compute the same model: {found['policy']}")
    return report(machine, found, ["batch-invariant operations", "10,000 tokens"])


def _apart(one_N: Tensor, other_N: Tensor) -> dict[str, Any]:
    gaps_N = (one_N.double() - other_N.double()).abs()
    return {
        "tokens": len(gaps_N),
        "different": int((gaps_N != 0).sum()),
        "max_abs_nats": gaps_N.max().item(),
        "mean_abs_nats": gaps_N.mean().item(),
    }


def _difference(name: str, policy: Tensor, engine: Tensor) -> dict[str, Any]:
    assert policy.shape == engine.shape, (
        f"{name}: {tuple(policy.shape)} in the policy, {tuple(engine.shape)}"
    )
    gaps = (policy.double() - engine.double()).abs()
    return {
        "name": name,
        "different_share": (gaps != 0).double().mean().item(),
        "max_abs": gaps.max().item(),
    }


def _be_batch_invariant() -> None:
    """Before the first product: cuBLAS reads its workspace's size then."""
    os.environ[_INVARIANT] = "1"
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    init_batch_invariance()


# ---- the policy


def _policy(model: Path, texts: list[list[int]]) -> tuple[Tensor, States]:
    """(N,) log-probs of all tokens behind the prompts, and the first text's states."""
    import numpy as np

    from openrlhf_ext.megatron.step.batch import sequence_batch
    from tests.gpu.alone import build
    from tests.gpu.policies import plain_layers

    def batch(rows: list[list[int]]) -> Any:
        return sequence_batch(
            [np.array(row, dtype=np.int32) for row in rows], [[(_PROMPT, len(row))] for row in rows]
        )

    with plain_layers():
        policy = build({"model": str(model), "dtype": "bf16"})
    with _recorded(_policy_modules(policy.chunks[0])) as states:
        policy.logprobs(batch(texts[:1]), temperature=1.0)
    return policy.logprobs(batch(texts), temperature=1.0).logprobs_N.float().cpu(), states


def _policy_modules(model: Any) -> Modules:
    yield "embedding", model.embedding.word_embeddings, _output
    for number, layer in enumerate(model.decoder.layers):
        attention = layer.self_attention
        groups, size = attention.config.num_query_groups, attention.config.kv_channels
        yield f"{number} qkv", attention.linear_qkv, partial(_as_vllm, groups, size)
        yield f"{number} rotated q", attention.core_attention, lambda args, _: args[0].flatten(1)
        yield f"{number} rotated k", attention.core_attention, lambda args, _: args[1].flatten(1)
        yield f"{number} attention", attention.core_attention, lambda _, out: out.flatten(1)
        yield f"{number} o_proj", attention.linear_proj, _output
        yield f"{number} gate_up", layer.mlp.linear_fc1, _output
        yield f"{number} activation", layer.mlp.linear_fc2, lambda args, _: args[0].flatten(0, -2)
        yield f"{number} down", layer.mlp.linear_fc2, _output
    yield "norm", model.decoder.final_layernorm, _output


def _as_vllm(groups: int, size: int, _: tuple, out: Any) -> Tensor:
    """Megatron has the heads of a group beside each other, vLLM all queries first."""
    rows = _output((), out).unflatten(-1, (groups, -1, size))
    return torch.cat(
        [rows[:, :, :-2].flatten(1), rows[:, :, -2].flatten(1), rows[:, :, -1].flatten(1)], -1
    )


def _output(_: tuple, out: Any) -> Tensor:
    """(T, ...) of a module that gives a tensor, or a tuple that begins with one."""
    tensor = out[0] if isinstance(out, tuple) else out
    return tensor.flatten(0, -2)


@contextmanager
def _recorded(modules: Modules) -> Iterator[States]:
    """What the modules compute in the body, once."""
    states: States = {}
    handles = []
    for name, module, meant in modules:

        def keep(
            _: Any,
            args: tuple,
            out: Any,
            name: str = name,
            meant: Callable[[tuple, Any], Tensor] = meant,
        ) -> None:
            # some are overwritten in place
            states[name] = meant(args, out).detach().to("cpu", copy=True)

        handles.append(module.register_forward_hook(keep))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


# ---- the engine


def _engine(machine: Machine, model: Path, file: Path) -> dict[str, Any]:
    """What ``main`` has written."""
    more = {_INVARIANT: "1"} if machine.on_gpu else {}
    command = [sys.executable, "-m", "tests.gpu.exactness", str(model), str(file)]
    subprocess.run(command, cwd=ROOT, env=os.environ | more, check=True)
    return torch.load(file, weights_only=False)


def main(model: Path, file: Path) -> None:
    """Samples, scores the same tokens as prompts, and records one text's modules."""
    from openrlhf_ext import patches
    from tests.gpu.engine_alone import names, runner_of, start

    patches.apply()
    machine = Machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"), None, 0.0)
    llm = start(machine, model, enforce_eager=True)
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
    with _recorded(_engine_modules(runner_of(llm).get_model())) as states:
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


def _engine_modules(model: Any) -> Modules:
    yield "embedding", model.model.embed_tokens, _output
    for number, layer in enumerate(model.model.layers):
        yield f"{number} qkv", layer.self_attn.qkv_proj, _output
        yield f"{number} rotated q", layer.self_attn.attn, lambda args, _: args[0]
        yield f"{number} rotated k", layer.self_attn.attn, lambda args, _: args[1]
        yield f"{number} attention", layer.self_attn.attn, _output
        yield f"{number} o_proj", layer.self_attn.o_proj, _output
        yield f"{number} gate_up", layer.mlp.gate_up_proj, _output
        yield f"{number} activation", layer.mlp.act_fn, _output
        yield f"{number} down", layer.mlp.down_proj, _output
    yield "norm", model.model.norm, _output


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
