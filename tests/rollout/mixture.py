"""Tiny mixtures of experts that vLLM serves on CPU, and what transformers says of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen3MoeConfig

from tests.rollout import tiny

EXPERTS, TOPK, LAYERS = 8, 2, 4
WIDTH = 48
"""Of an expert. vLLM's CPU kernel pads it to 64, and the half of it that one of two workers has to
32."""


def random_model(
    seed: int, family: str = "qwen3_moe", vocab: int = tiny.VOCAB, width: int = WIDTH
) -> PreTrainedModel:
    """Routers far from even: the order of two experts of a token is not a matter of rounding."""
    torch.manual_seed(seed)
    usual: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": None,
    }
    if family == "qwen3_moe":
        config: Any = Qwen3MoeConfig(**usual, head_dim=32, norm_topk_prob=True)
    else:
        config = Qwen2MoeConfig(**usual, shared_expert_intermediate_size=80, norm_topk_prob=False)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(5)
    return model


def save_checkpoint(
    path: Path, family: str = "qwen3_moe", seed: int = 0, vocab: int = tiny.VOCAB
) -> None:
    tiny.save_tokenizer(path)
    random_model(seed, family, vocab).save_pretrained(path)


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """By the names of checkpoints, every expert's by themselves: transformers 5 holds those of a
    layer together."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for number, (gate, up) in enumerate(each.chunk(2) for each in tensor):
                at = name.removesuffix("gate_up_proj") + str(number)
                found |= {
                    f"{at}.gate_proj.weight": gate.contiguous(),
                    f"{at}.up_proj.weight": up.contiguous(),
                }
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix("down_proj")
            found |= {f"{at}{number}.down_proj.weight": down for number, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


class Truth(NamedTuple):
    """Of a text of S tokens: log-probs of all but the first, and the experts of all but the last,
    in order."""

    logprobs_R: Tensor
    experts_RLK: Tensor


@torch.no_grad()
def truth(model: PreTrainedModel, tokens: list[int]) -> Truth:
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(partial(_keep, chosen))  # type: ignore[union-attr, operator]
        for layer in model.model.layers
    ]
    logprobs_R = tiny.logprobs(model, tokens)
    for hook in hooks:
        hook.remove()
    return Truth(logprobs_R, torch.stack(chosen, 1)[:-1].sort(-1).values)


@torch.no_grad()
def entropies(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """(S-1,) in nats, of the distributions of all tokens but the first."""
    logprobs_RV = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return -(logprobs_RV.exp() * logprobs_RV).sum(-1)


def _keep(
    chosen: list[Tensor], router: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    chosen.append(outputs[2])


def in_order(experts_RLK: Any) -> Tensor:
    """As `Truth` has them: in which order a router names the experts of a token does not matter."""
    return torch.from_numpy(experts_RLK.astype("int64")).sort(-1).values
