"""Checkpoints of real shapes with random weights, made on the device in seconds, with a tokenizer
of as many words."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """A Qwen2 by the names of its ``config.json``."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    def write(self, folder: Path) -> Path:
        """``folder`` with a ``config.json`` and no weights."""
        more = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "rope_theta": 1e6,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(self) | more))
        return folder


@dataclass(frozen=True)
class Mixture(Model):
    """A Qwen3 with experts: of three and more a token the sum depends on the order in which they
    are added."""

    num_experts: int = 16
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 256

    def write(self, folder: Path) -> Path:
        """As that of ``Model``."""
        file = super().write(folder) / "config.json"
        more = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
        }
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
        return folder


SEVEN_B = Model(28, 3584, 28, 4, 128, 18944, 152064)
TINY = Model(2, 128, 4, 2, 32, 256, 512)
_SHARD = 4 << 30


def make_checkpoint(folder: Path, model: Model, device: torch.device) -> Path:
    """``folder`` with a Qwen2 in bf16 of this shape, in Hugging Face form."""
    make_config(folder, model)
    shards: list[dict[str, Tensor]] = [{}]
    for name, shape in tensor_shapes(folder).items():
        tensor = drawn(name, torch.empty(shape, device=device)).to(torch.bfloat16)
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > _SHARD:
            _write(folder, shards)
            shards.append({})
        shards[-1][name] = tensor.cpu()
    _write(folder, shards)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a run is about to count the device's memory
    files = {name: _shard(number) for number, shard in enumerate(shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    return folder


def make_config(folder: Path, model: Model) -> Path:
    """``folder`` with configuration and tokenizer alone, for weights that are made up where they
    are needed."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    model.write(folder)
    config = json.loads((folder / "config.json").read_text())
    more = {"pad_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | more))
    words = ["<|endoftext|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # every sampled token is some text
    words += [f"<w{number}>" for number in range(len(words), model.vocab_size)]
    tokenizer = Tokenizer(BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.add_special_tokens(words[:2])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=words[0], eos_token=words[1]
    ).save_pretrained(folder)
    return folder


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, as transformers has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _shard(number: int) -> str:
    return f"model-{number:05}.safetensors"


def _write(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    """Writes the last one, and forgets its values."""
    save_file(shards[-1], folder / _shard(len(shards) - 1), metadata={"format": "pt"})
    shards[-1] = dict.fromkeys(shards[-1], torch.empty(0))


def drawn(name: str, like: Tensor, draw: int = 0) -> Tensor:
    """fp32 values of a size at which a parameter matters; always the same for the same name on the
    same device."""
    generator = torch.Generator(like.device).manual_seed(zlib.crc32(f"{draw} {name}".encode()))
    values = torch.empty(like.shape, device=like.device).normal_(generator=generator)
    if "norm" in name:
        return values.mul_(0.1).add_(1.0)
    return values.mul_(0.1 if name.endswith("bias") else like.shape[-1] ** -0.5)
