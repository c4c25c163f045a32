"""Tiny Hugging Face checkpoints that tests make for themselves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from openrlhf_ext.megatron.model.hf_files import HFRows, read_side_files, save_hf
from openrlhf_ext.megatron.model.weight_map import HFTensor

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
}
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
_EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
}
MIXTURES: dict[str, dict[str, Any]] = {  # entries of their configuration
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 80, "norm_topk_prob": False},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
}
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 80},
}
# of the other families whose classes' defaults are not what a test wants
_ENTRIES: dict[str, dict[str, Any]] = {
    **MIXTURES,
    **HYBRIDS,
    "granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 2.0,
    },
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}


def make_tiny_model(
    path: Path,
    family: str = "qwen2",
    *,
    tied: bool = False,
    vocab: int = 61,
    layers: int = 4,
    heads: int = 4,
    seed: int = 0,
    **more,
) -> PreTrainedModel:
    """A random fp32 checkpoint with norms and biases off their trivial values, saved to
    ``path``."""
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    more = {**_ENTRIES.get(family, {}), **more}
    config = config_class(
        vocab_size=vocab,
        hidden_size=16 * heads,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **more,
    )
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            if "mlp.gate." in name:  # routers that are sure of their choice
                parameter.mul_(5)
    model.save_pretrained(path)
    return model


def unfused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A mixture's tensors as its checkpoint has them, of each expert; transformers holds all
    experts' in one."""
    found = {}
    for name, tensor in tensors.items():
        path, _, fused = name.rpartition(".experts.")
        if not path:
            found[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            parts = (
                zip(("gate", "up"), own.chunk(2), strict=True)
                if fused == "gate_up_proj"
                else [("down", own)]
            )
            found |= {
                f"{path}.experts.{expert}.{part}_proj.weight": values for part, values in parts
            }
    return found


CHAT_TEMPLATE = (  # SmolLM2's
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_policy(
    path: Path,
    family: str = "qwen2",
    *,
    seed: int = 0,
    chat_template: str | None = None,
    **shape: int,
) -> None:
    """A random checkpoint with a byte-level tokenizer that vLLM's CPU build can run (head size 32).

    Args:
        chat_template: of the tokenizer, which then has the token that begins a message.
        shape: entries of its configuration.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_end|>", *(["<|im_start|>"] if chat_template else [])]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1]
    )
    fast.chat_template = chat_template
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(words),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    } | shape
    config_class, model_class = FAMILIES[family]
    sizes = {**_ENTRIES.get(family, {}), **sizes}
    config = config_class(
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **sizes,
    )
    model = model_class(config).float()
    if family == "qwen3_5_text":
        # the row of padding is 0, which norms behind norms turn into a gradient of 1e10
        with torch.no_grad():
            model.get_input_embeddings().weight[0].normal_(std=0.1)
    model.save_pretrained(path)
    fast.save_pretrained(path)


def make_reward_model(
    path: Path,
    language_model: Path,
    kind: Any = AutoModelForSequenceClassification,
    **config: float,
) -> PreTrainedModel:
    """A sequence classifier of transformers, a decoder with a bias-free linear head called
    ``score``, of the language model's decoder, with its tokenizer and these entries in its
    config.json."""
    model = kind.from_pretrained(language_model, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(
            torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(9))
        )
    model.config.update(config)
    model.save_pretrained(path)
    for file in language_model.glob("tokenizer*.json"):
        shutil.copy(file, path)
    return model


def rows_of(tensors: Mapping[str, Tensor]) -> Iterator[HFRows]:
    """Whole tensors as an export yields them, in about three pieces each."""
    for name, tensor in tensors.items():
        step = max(1, len(tensor) // 3)
        for start in range(0, len(tensor), step):
            yield HFRows(name, start, tensor[start : start + step])


def save_tensors(
    tensors: Mapping[str, Tensor], source: Path, target: Path, *more, **named
) -> dict[str, int]:
    """``save_hf`` of whole tensors of one dtype."""
    specs = [HFTensor(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    return save_hf(rows_of(tensors), specs, dtype, read_side_files(source), target, *more, **named)
