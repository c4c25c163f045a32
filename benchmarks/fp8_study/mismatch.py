"""How far trainer and rollout engine disagree, by the precision of each.

    python -m benchmarks.fp8_study.mismatch --model CHECKPOINT --rollouts FILE.jsonl --trainer_tp 2
    python -m benchmarks.fp8_study.mismatch --model CHECKPOINT --rollouts FILE.jsonl --per_layer
    --figure OUT.png

Log-probs of given rollouts under each pair of precisions, emulated in plain torch on any device: a
transformers model takes the linear layers of its decoder out and emulated ones in, with the weights
cut into tiles as Megatron or vLLM cuts them. One sequence is one pack: under 'current' a log-prob
would depend on what shares it. Beside the model, fp32 copies of the decoder's linear weights need
memory. Exit status: 0; 2 if something given is wrong.

Shape suffixes: T = tokens, K = input features, N = tokens of all completions.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf_ext.cli.main import CommandParser, at_least, positive, silence_libraries
from openrlhf_ext.config.tokenizers import tokenizer_fault
from openrlhf_ext.fp8.quantize import DelayedScale, Products
from openrlhf_ext.fp8.recipe import (
    BY_COLUMNS,
    BF16Layers,
    LayerShape,
    Recipe,
    Run,
    differing_tensors,
    engine_shards,
    trainer_shards,
)
from openrlhf_ext.inputs import INTEGER, TEXT, InputError, check, decode, json_lines, list_of
from openrlhf_ext.outputs import aligned

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
RECIPES = {
    "blockwise": Recipe(),
    "blockwise_pow2": Recipe(scales="pow2"),
    "current": Recipe("current", "hybrid"),
    "delayed": Recipe("delayed", "hybrid"),
}
PRECISIONS = (*PLAIN, *RECIPES)
CLIP = 2.0  # of truncated importance sampling
_NONE = BF16Layers()
Shards = list[list[Run]]


@dataclass(frozen=True)
class Completion:
    """Tokens of a prompt and of what was sampled for it."""

    prompt_ids: list[int]
    response_ids: list[int]


@dataclass(frozen=True)
class Mismatch:
    """What was measured.

    Attributes:
        cells: (trainer's precision, engine's) -> ``gauges``.
        layers: engine's precision -> mean |log-prob difference| to the unquantized model with only
            that decoder layer in FP8, for every layer; empty unless asked for.
        other_tiles: weights that the two cut into different tiles.
    """

    tokens: int
    cells: dict[tuple[str, str], dict[str, float]]
    layers: dict[str, list[float]]
    other_tiles: list[str]

    def to_json(self) -> dict[str, Any]:
        cells = [
            {"trainer": trainer, "rollout": rollout} | values
            for (trainer, rollout), values in self.cells.items()
        ]
        return {
            "emulated": True,
            "tokens": self.tokens,
            "cells": cells,
            "layers": self.layers,
            "other_tiles": self.other_tiles,
        }


def read_completions(
    path: Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> list[Completion]:
    """Completions of a file, one JSON object per line, of which 'prompt' and 'token_ids' are read
    (docs/explain.md).

    Raises:
        ValueError: a line is wrong (named), or there is none.
    """
    found: list[Completion] = []
    for number, line in islice(json_lines(path), limit):
        where = f"{path}, line {number}"
        record = check(decode(line, where), where, {"prompt": TEXT, "token_ids": list_of(INTEGER)})
        found.append(_completion(record, where, tokenizer))
    if not found:
        raise ValueError(f"{path} holds no completion")
    return found


def _completion(
    record: dict[str, Any], where: str, tokenizer: PreTrainedTokenizerBase
) -> Completion:
    prompt_ids, response_ids = (
        tokenizer(record["prompt"], add_special_tokens=False)["input_ids"],
        record["token_ids"],
    )
    if not prompt_ids or not response_ids:
        raise InputError(f"{where}: prompt and token_ids must have at least one token")
    if wrong := [i for i in response_ids if not 0 <= i < len(tokenizer)]:
        raise InputError(
            f"{where}: token_ids: {wrong[0]} is none of the tokenizer's {len(tokenizer)} tokens"
        )
    return Completion(prompt_ids, response_ids)


def measure(
    load: Callable[[torch.dtype], PreTrainedModel],
    completions: Sequence[Completion],
    *,
    trainer: Sequence[str],
    rollout: Sequence[str],
    trainer_tp: int = 1,
    engine_tp: int = 1,
    dtype: torch.dtype = torch.float32,
    bf16_layers: BF16Layers = _NONE,
    per_layer: bool = False,
) -> Mismatch:
    """Gauges of every pair of precisions.

    Args:
        load: the model in a dtype, in evaluation mode, on its device.
        trainer_tp, engine_tp: tensor-parallel sizes, by which weights are cut.
        dtype: of what is not in FP8.
        bf16_layers: decoder layers that are not, on either side; apart from those that
        ``per_layer`` takes alone.

    Raises:
        ValueError: a size does not divide heads or MLP, or the model's decoder has other linear
        layers than a Llama's.
    """
    model = load(dtype)
    shape = _layer_shape(model)
    shards = {
        "trainer": trainer_shards(shape, trainer_tp),
        "rollout": engine_shards(shape, engine_tp),
    }
    sides = {"trainer": trainer, "rollout": rollout}
    count = len(_layers(model))
    quantized = sorted(set(range(count)) - set(bf16_layers.numbers(count)))
    found: dict[tuple[str, str], Tensor] = {}
    for side, precision in (
        (side, p) for side, names in sides.items() for p in names if p in RECIPES
    ):
        with _emulated(model, RECIPES[precision], shards[side], completions, quantized):
            found[side, precision] = response_logprobs(model, completions)
    layers = _sensitivities(model, completions, rollout, shards["rollout"]) if per_layer else {}
    for name in dict.fromkeys(p for names in sides.values() for p in names if p in PLAIN):
        model = model if PLAIN[name] is dtype else load(PLAIN[name])
        found["trainer", name] = found["rollout", name] = response_logprobs(model, completions)
        dtype = PLAIN[name]
    cells = {
        (t, r): gauges(found["trainer", t], found["rollout", r]) for t in trainer for r in rollout
    }
    tokens = sum(len(completion.response_ids) for completion in completions)
    return Mismatch(tokens, cells, layers, differing_tensors(shape, trainer_tp, engine_tp))


def gauges(trainer_N: Tensor, rollout_N: Tensor) -> dict[str, float]:
    """How far log-probs are from those that tokens were sampled with; d = trainer - rollout, w =
    exp(d).

    k3_rollout estimates KL(rollout || trainer), w - 1 - d, and k3_trainer the other direction, 1 -
    w + w d; token_mult_prob_error is the mean of exp(|d|); ess the effective share of samples
    weighted by w; clipped the share of tokens whose w is above 2.
    """
    d_N = trainer_N.double() - rollout_N.double()
    w_N = d_N.exp()
    return {
        "mean_abs": d_N.abs().mean().item(),
        "max_abs": d_N.abs().max().item(),
        "k3_rollout": (w_N - 1 - d_N).mean().item(),
        "k3_trainer": (1 - w_N + w_N * d_N).mean().item(),
        "token_mult_prob_error": d_N.abs().exp().mean().item(),
        "is_mean": w_N.mean().item(),
        "ess": (w_N.sum().square() / w_N.square().sum() / len(w_N)).item(),
        "clipped": (w_N > CLIP).double().mean().item(),
    }


@torch.no_grad()
def response_logprobs(model: PreTrainedModel, completions: Sequence[Completion]) -> Tensor:
    """(N,) fp64 log-probs of the completions' tokens, temperature 1."""
    parts = []
    for completion in completions:
        ids = torch.tensor(
            [[*completion.prompt_ids, *completion.response_ids]], device=model.device
        )
        start = len(completion.prompt_ids)
        log_probs = torch.log_softmax(
            model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].double(), -1
        )
        parts.append(log_probs.gather(1, ids[0, start:, None])[:, 0].cpu())
    return torch.cat(parts)


def _sensitivities(
    model: PreTrainedModel,
    completions: Sequence[Completion],
    precisions: Sequence[str],
    shards: Shards,
) -> dict[str, list[float]]:
    plain_N = response_logprobs(model, completions)
    found: dict[str, list[float]] = {}
    for precision in (p for p in precisions if p in RECIPES):
        found[precision] = []
        for number in range(len(_layers(model))):
            with _emulated(model, RECIPES[precision], shards, completions, [number]):
                found[precision].append(
                    (response_logprobs(model, completions) - plain_N).abs().mean().item()
                )
    return found


# ---- a model with emulated layers


class _EmulatedLinear(nn.Module):
    """A linear layer with both operands rounded.

    Its inputs are rounded in the parts that ranks hold. Delayed scaling first notes what passes,
    unrounded.
    """

    def __init__(
        self, linear: nn.Linear, products: Products, w_NK: Tensor, parts: list[int]
    ) -> None:
        super().__init__()
        # a list: no submodule
        self._linear, self._products, self._w_NK, self._parts = [linear], products, w_NK, parts
        self.scales: list[DelayedScale | None] = [
            products.scales(w_NK.device).get("x") for _ in parts
        ]
        self.noting = False

    def forward(self, x: Tensor) -> Tensor:
        parts = list(zip(x.flatten(0, -2).split(self._parts, -1), self.scales, strict=True))
        if self.noting:
            for part_TK, scale in parts:
                assert scale is not None, "only delayed scaling notes"
                scale.record(part_TK)
            return self._linear[0](x)
        rounded = [
            self._products.codes("x", part_TK, scale=scale.scale if scale else None).values()
            for part_TK, scale in parts
        ]
        y = (torch.cat(rounded, -1) @ self._w_NK.t()).to(x.dtype).unflatten(0, x.shape[:-1])
        bias = self._linear[0].bias
        return y if bias is None else y + bias


@contextmanager
def _emulated(
    model: PreTrainedModel,
    recipe: Recipe,
    shards: Shards,
    completions: Sequence[Completion],
    numbers: Collection[int],
) -> Iterator[None]:
    """The model with the decoder layers of these numbers in FP8.

    Scales of delayed scaling come from one pass over the completions.
    """
    places: list[tuple[nn.Module, str, nn.Linear]] = []
    emulated: list[_EmulatedLinear] = []
    try:
        for number, layer in enumerate(_layers(model)):
            if number not in numbers:
                continue
            for name, replacement in _replacements(layer, recipe, shards).items():
                path, _, leaf = name.removesuffix(".weight").rpartition(".")
                places.append((layer.get_submodule(path), leaf, _linear(layer, name)))
                setattr(layer.get_submodule(path), leaf, replacement)
                emulated.append(replacement)
        if recipe.delayed:
            _note_scales(model, emulated, completions)
        yield
    finally:
        for parent, leaf, linear in places:
            setattr(parent, leaf, linear)


def _note_scales(
    model: PreTrainedModel, layers: list[_EmulatedLinear], completions: Sequence[Completion]
) -> None:
    for layer in layers:
        layer.noting = True
    response_logprobs(model, completions)
    for layer in layers:
        layer.noting = False
        for scale in layer.scales:
            _close(scale)


def _close(scale: DelayedScale | None) -> Tensor | None:
    """What the next micro-batch is multiplied by."""
    if scale is None:
        return None
    scale.update(scale.history_A[0].clone())
    return scale.scale


def _replacements(layer: nn.Module, recipe: Recipe, shards: Shards) -> dict[str, _EmulatedLinear]:
    """Weight's name within the layer -> what takes the place of its layer.

    Of a key-value head that several ranks of an engine hold the last one's copy stands for all.
    """
    linears = {
        name: _linear(layer, name) for name in {run.tensor for shard in shards for run in shard}
    }
    products = Products(recipe)
    rounded = {
        name: torch.empty_like(linear.weight, dtype=torch.float32)
        for name, linear in linears.items()
    }
    for shard in shards:
        axis = int(shard[0].tensor in BY_COLUMNS)
        w_NK = torch.cat(
            [_of(linears[run.tensor].weight.detach(), axis, run) for run in shard], axis
        )
        scale = products.scales(w_NK.device).get("w")
        if scale is not None:
            scale.record(w_NK)
        values = products.codes("w", w_NK, scale=_close(scale)).values()
        for run, part in zip(
            shard, values.split([run.stop - run.start for run in shard], axis), strict=True
        ):
            _of(rounded[run.tensor], axis, run).copy_(part)
    parts = {
        name: [run.stop - run.start for shard in shards for run in shard if run.tensor == name]
        for name in BY_COLUMNS
    }
    return {
        name: _EmulatedLinear(
            linear, products, rounded[name], parts.get(name, [linear.weight.shape[1]])
        )
        for name, linear in linears.items()
    }


def _linear(layer: nn.Module, weight: str) -> nn.Linear:
    found = layer.get_submodule(weight.removesuffix(".weight"))
    assert isinstance(found, nn.Linear), "_layer_shape has seen it"
    return found


def _of(weight: Tensor, axis: int, run: Run) -> Tensor:
    return weight.narrow(axis, run.start, run.stop - run.start)


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    return model.get_decoder().layers


def _layer_shape(model: PreTrainedModel) -> LayerShape:
    config = model.config
    shape = LayerShape(
        config.num_attention_heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        config.intermediate_size,
    )
    expected = {run.tensor for shard in trainer_shards(shape, 1) for run in shard}
    linears = {
        f"{name}.weight"
        for name, m in _layers(model)[0].named_modules()
        if isinstance(m, nn.Linear)
    }
    if linears != expected:
        family = config.model_type
        raise ValueError(
            f"a {family} decoder has the linear layers {sorted(linears)}, only "
            f"{sorted(expected)} are known"
        )
    return shape


# ---- the table
# --------------------------------------------------------------------------------------------------


def table(mismatch: Mismatch) -> str:
    """The gauges, a line for each pair, and a line for each layer."""
    names = list(next(iter(mismatch.cells.values())))
    rows = [["trainer", "rollout", *names]]
    rows += [
        [*pair, *(_number(values[name]) for name in names)]
        for pair, values in mismatch.cells.items()
    ]
    lines = aligned(rows, str.ljust)
    if mismatch.layers:
        layers = enumerate(zip(*mismatch.layers.values(), strict=True))
        rows = [
            ["only layer", *mismatch.layers],
            *([str(number), *map(_number, row)] for number, row in layers),
        ]
        lines += ["", "mean_abs against no FP8", *aligned(rows, str.ljust)]
    return "\n".join(lines)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.4f}" if math.fabs(value) >= 0.01 else f"{value:.1e}"


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    silence_libraries()
    arguments = _parser().parse_args(argv)
    try:
        found = _measured(arguments)
        if arguments.json:
            Path(arguments.json).write_text(
                json.dumps({"settings": vars(arguments)} | found.to_json(), indent=1) + "\n"
            )
    except (ValueError, OSError) as error:
        print(f"fp8_mismatch: {error}", file=sys.stderr)
        return 2
    print(
        f"EMULATED, {found.tokens} tokens, trainer TP {arguments.trainer_tp}, engine TP "
        f"{arguments.engine_tp}"
    )
    if found.other_tiles:
        print("trainer and engine cut different 128x128 tiles of " + ", ".join(found.other_tiles))
    print(table(found))
    return 0


def _measured(arguments: argparse.Namespace) -> Mismatch:
    if not Path(arguments.model).is_dir():
        raise ValueError(
            f"--model must be a folder with a Hugging Face checkpoint: {arguments.model} is none"
        )
    if (fault := tokenizer_fault(arguments.model, chat=False)) is not None:
        raise ValueError(f"--model: {arguments.model} {fault}")
    # late: after the libraries were silenced
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load(dtype: torch.dtype) -> PreTrainedModel:
        return (
            AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
            .to(arguments.device)
            .eval()
        )

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    return measure(
        load,
        read_completions(Path(arguments.rollouts), tokenizer, arguments.limit),
        trainer=arguments.trainer,
        rollout=arguments.rollout,
        trainer_tp=arguments.trainer_tp,
        engine_tp=arguments.engine_tp,
        dtype=PLAIN[arguments.dtype],
        per_layer=arguments.per_layer,
        bf16_layers=BF16Layers(arguments.layers_in_bf16_start, arguments.layers_in_bf16_end),
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("fp8_mismatch", __doc__.split("\n")[0])
    parser.prog = "python -m benchmarks.fp8_study.mismatch"
    add = parser.add_argument
    engine = [name for name in PRECISIONS if name != "delayed"]  # no engine has it
    add("--model", required=True, help="folder of a Hugging Face checkpoint with its tokenizer")
    add(
        "--rollouts",
        required=True,
        metavar="FILE.jsonl",
        help="one completion per line: prompt, token_ids",
    )
    add(
        "--trainer",
        nargs="+",
        choices=PRECISIONS,
        default=list(PRECISIONS),
        help="precisions of the trainer",
    )
    add("--rollout", nargs="+", choices=engine, default=engine[1:], help="precisions of the engine")
    add(
        "--trainer_tp",
        type=positive,
        default=1,
        help="tensor-parallel size of the trainer, which cuts its tiles",
    )
    add("--engine_tp", type=positive, default=1, help="tensor-parallel size of the engine")
    add("--dtype", default="fp32", choices=["fp32", "bf16"], help="of all that is not in FP8")
    add(
        "--layers_in_bf16_start",
        type=at_least(0),
        default=0,
        help="first decoder layers that are not in FP8, on both sides",
    )
    add(
        "--layers_in_bf16_end", type=at_least(0), default=0, help="last decoder layers that are not"
    )
    add(
        "--limit", type=positive, help="completions taken from the start of the file (default: all)"
    )
    add(
        "--per_layer", action="store_true", help="also with only one decoder layer in FP8, for each"
    )
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--json", metavar="OUT", help="write the result to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
