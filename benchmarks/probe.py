"""How far apart the log-probs of two implementations of a real model are, and what a fault makes of
it.

    python benchmarks/probe.py MODEL --output benchmarks/results/probe_cpu.json    # a Llama; two
    minutes for 135M

The scale of ``weight_sync.probe_tolerance``: policy and transformers score the same text, in bf16
and fp32, and then transformers does in bf16 with one fault at a time. The text is what the model
says after a question, sampled and greedy, 160 tokens in all; each difference is the mean over its
tokens, below a log-prob of -5 in proportion (``openrlhf_ext/rollout/probe.py``). "largest" is what
one token shows, in nats.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record  # noqa: E402
from openrlhf_ext import patches  # noqa: E402

patches.apply()

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from openrlhf_ext.fp8.recipe import Recipe  # noqa: E402
from openrlhf_ext.megatron.distributed import initialize_distributed  # noqa: E402
from openrlhf_ext.megatron.layers.fp8 import FP8Layers  # noqa: E402
from openrlhf_ext.megatron.layout import ParallelLayout  # noqa: E402
from openrlhf_ext.megatron.policy import MegatronPolicy  # noqa: E402
from openrlhf_ext.megatron.settings import ModelSettings  # noqa: E402
from openrlhf_ext.megatron.step.batch import sequence_batch  # noqa: E402
from openrlhf_ext.rollout.probe import relative_difference  # noqa: E402

TOKENS = 160
QUESTION = "What is 13 + 7?"
TEMPERATURES = (0.9, 0.95, 1.05, 1.2)
STEPS = (1e-5, 1e-4, 1e-3)

Scorer = Callable[[Tensor], Tensor]
"""(T,) tokens -> (T-1,) log-probs of all but the first."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a Llama checkpoint with a chat template")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    initialize_distributed(ParallelLayout(1, 1, 1, 1), 600.0, 0)
    result = about(arguments.model) | {"differences": list(rows(arguments.model))}
    print(json.dumps(result, indent=1))
    if arguments.output:
        record.write(arguments.output, result)


def rows(path: str) -> Iterator[dict[str, Any]]:
    """Every comparison on every text."""
    bf16, fp32 = (load(path, dtype) for dtype in (torch.bfloat16, torch.float32))
    settings = ModelSettings(path, ParallelLayout(1, 1, 1, 1))
    policy = scorer_of(settings)
    layers = {name: (FP8Layers(Recipe(name, emulate=True)),) for name in ("blockwise", "current")}
    fp8 = {
        name: scorer_of(replace(settings, converters=converters))
        for name, converters in layers.items()
    }
    for kind, text in texts(path, fp32).items():
        found: dict[str, tuple[Tensor, Tensor]] = {
            "policy bf16, transformers bf16": (policy(text), score(bf16, text)),
            "policy bf16, transformers fp32": (policy(text), score(fp32, text)),
            "transformers bf16, transformers fp32": (score(bf16, text), score(fp32, text)),
        }
        found |= {
            f"policy bf16, policy FP8 {name}": (policy(text), other(text))
            for name, other in fp8.items()
        }
        sound = score(bf16, text)
        for name, fault in faults(bf16):
            with fault as options:
                found[name] = (sound, score(bf16, text, **options))
        for name, pair in found.items():
            largest = float((pair[0].double() - pair[1].double()).abs().max())
            yield {
                "text": kind,
                "between": name,
                "mean": relative_difference(*pair).mean,
                "largest": largest,
            }


def load(path: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()


def scorer_of(settings: ModelSettings) -> Scorer:
    """The policy on one rank."""
    policy = MegatronPolicy(settings)
    return lambda text: (
        policy.logprobs(sequence_batch([text.numpy()], [[(1, len(text))]]), 1.0).logprobs_N
    )


@torch.no_grad()
def score(model: Any, text: Tensor, temperature: float = 1.0, stretch: int = 1) -> Tensor:
    """By transformers; ``stretch``: the distance between neighboring positions."""
    positions = torch.arange(len(text))[None] * stretch
    logp = (
        model(text[None], position_ids=positions).logits[0, :-1].float() / temperature
    ).log_softmax(-1)
    return logp.gather(1, text[1:, None]).squeeze(1)


def texts(path: str, model: Any) -> dict[str, Tensor]:
    """What the model says after a question, sampled and greedy, past its end; and random tokens."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    question = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    more = TOKENS - ids.shape[1]
    torch.manual_seed(0)
    options = {"max_new_tokens": more, "min_new_tokens": more}
    return {
        "sampled": model.generate(ids, do_sample=True, temperature=1.0, top_k=0, **options)[0],
        "greedy": model.generate(ids, do_sample=False, **options)[0],
        "random tokens": torch.randint(0, model.config.vocab_size, (TOKENS,)),
    }


def faults(model: Any) -> Iterator[tuple[str, Any]]:
    """Names and contexts, inside of which the model or the options it is scored with are wrong."""
    for temperature in TEMPERATURES:
        yield f"temperature {temperature}", options_of(temperature=temperature)
    yield "positions doubled", options_of(stretch=2)
    layers, middle = model.model.layers, len(model.model.layers) // 3
    one, other = layers[middle], layers[middle + 1]
    pairs = list(
        zip(
            [*one.parameters(), *other.parameters()],
            [*other.parameters(), *one.parameters()],
            strict=True,
        )
    )
    yield "two layers exchanged", weights_as([(to, source.data.clone()) for to, source in pairs])
    key, head = one.self_attn.k_proj.weight, one.self_attn.head_dim
    first, second, *others = key.detach().split(head)
    yield "two key heads exchanged", weights_as([(key, torch.cat([second, first, *others]))])
    gate, up = one.mlp.gate_proj.weight, one.mlp.up_proj.weight
    yield "gate and up exchanged", weights_as([(gate, up.data.clone()), (up, gate.data.clone())])
    for step in STEPS:
        yield f"all weights moved by {step:g}", weights_as(moved(model, step))


def moved(model: Any, step: float) -> list[tuple[Tensor, Tensor]]:
    """Each entry a step up or down by chance, as Adam's steps are long."""
    generator = torch.Generator().manual_seed(1)
    signs = (
        (p, torch.randint(0, 2, p.shape, generator=generator) * 2 - 1) for p in model.parameters()
    )
    return [(p, (p.data.float() + step * sign).to(p.dtype)) for p, sign in signs]


@contextmanager
def options_of(**options: Any) -> Iterator[dict[str, Any]]:
    yield options


@contextmanager
def weights_as(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[dict[str, Any]]:
    kept = [parameter.data.clone() for parameter, _ in pairs]
    for parameter, values in pairs:
        parameter.data.copy_(values)
    yield {}
    for (parameter, _), values in zip(pairs, kept, strict=True):
        parameter.data.copy_(values)


def about(path: str) -> dict[str, Any]:
    """What a number needs to be repeated."""
    config = json.loads((Path(path) / "config.json").read_text())
    shape = {name: config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    here = record.environment("torch", "megatron-core", "transformers")
    return {**here, "model": {"name": Path(path).name, **shape}}


if __name__ == "__main__":
    main()
