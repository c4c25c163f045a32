"""A model of transformers that computes as FP8 engines do, and engines that tell what their linear
layers hold."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm.model_executor.layers.linear import LinearBase

from openrlhf_ext.fp8.quantize import E4M3, Grid, Quantized, quantize
from tests.rollout import tiny
from tests.rollout.spoiling import SpoilingExtension

QUALIFIED_NAME = "tests.rollout.fp8_model.TellingExtension"
LAYERS, VOCAB = 3, tiny.VOCAB


def random_model(seed: int) -> Qwen2ForCausalLM:
    """Projections whose parts are no multiples of 128 wide, on one worker or on two."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=416,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
        initializer_range=0.06,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def fused(model: Any, number: int, workers: int) -> dict[str, list[tuple[list[nn.Linear], Tensor]]]:
    """vLLM's weights of a decoder layer: of each worker the layers whose rows lie in it, and the
    values."""
    layer = model.model.layers[number]
    attention, mlp = layer.self_attn, layer.mlp
    columns = {
        "self_attn.qkv_proj": [attention.q_proj, attention.k_proj, attention.v_proj],
        "mlp.gate_up_proj": [mlp.gate_proj, mlp.up_proj],
    }
    found = {}
    for name, parts in columns.items():
        cut = [part.weight.detach().chunk(workers) for part in parts]
        found[name] = [(parts, torch.cat(shards)) for shards in zip(*cut, strict=True)]
    for name, part in {
        "self_attn.o_proj": attention.o_proj,
        "mlp.down_proj": mlp.down_proj,
    }.items():
        found[name] = [
            ([part], shard.contiguous()) for shard in part.weight.detach().chunk(workers, dim=1)
        ]
    return found


def codes(model: Any, workers: int, bf16_layers: list[int]) -> list[dict[str, str]]:
    """What ``TellingExtension.fp8_digests`` tells on each worker."""
    numbers = [number for number in range(LAYERS) if number not in bf16_layers]
    return [
        {
            f"model.layers.{number}.{name}": digest(quantize(shards[worker][1], E4M3, Grid.TILES))
            for number in numbers
            for name, shards in fused(model, number, workers).items()
        }
        for worker in range(workers)
    ]


def emulate(model: Any, workers: int, bf16_layers: list[int]) -> Any:
    """The same model with linear layers in FP8, as an engine's workers compute them."""
    for number in set(range(LAYERS)) - set(bf16_layers):
        for shards in fused(model, number, workers).values():
            parts = shards[0][0]
            values = [quantize(weight, E4M3, Grid.TILES).values() for _, weight in shards]
            if len(parts) == 1:  # cut by columns: the workers' results add up
                parts[0].forward = partial(_linear, values, parts[0].bias)
                continue
            rows = [
                value.split([len(part.weight) // workers for part in parts]) for value in values
            ]
            for part, own in zip(parts, zip(*rows, strict=True), strict=True):
                part.forward = partial(_linear, [torch.cat(own)], part.bias)
    return model


def _linear(shards: list[Tensor], bias: Tensor | None, x: Tensor) -> Tensor:
    pieces = [
        quantize(piece, E4M3, Grid.ROWS).values()
        for piece in x.flatten(0, -2).chunk(len(shards), dim=1)
    ]
    y = sum((x_TK @ w_NK.t()).to(x.dtype) for x_TK, w_NK in zip(pieces, shards, strict=True))
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def digest(weight: Quantized) -> str:
    parts = (weight.codes_RC.contiguous().view(torch.uint8), weight.scale_inv.contiguous())
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


class TellingExtension(SpoilingExtension):
    def fp8_digests(self) -> dict[str, str]:
        linear = [
            item
            for item in self.model_runner.get_model().named_modules()
            if isinstance(item[1], LinearBase)
        ]
        return {
            name: digest(
                Quantized(module.weight.detach(), module.weight_scale_inv.detach(), Grid.TILES)
            )
            for name, module in linear
            if module.weight.dtype == E4M3
        }


class TellingEngine(tiny.SabotagedEngine):
    async def __init__(self, *args: Any, **kwargs: Any) -> None:
        await super().__init__(*args, worker_extension_cls=QUALIFIED_NAME, **kwargs)

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        return await self.llm.collective_rpc(method, args=args)
