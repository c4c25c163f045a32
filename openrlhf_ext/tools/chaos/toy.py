"""The run that is disturbed if no other is named: the quickstart's options, on a random policy that
is quickly made."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from openrlhf_ext.inputs import shipped

_REWARD = '''"""A share, so that groups have a spread."""


def reward_func(queries, prompts, labels, **kwargs):
    text = queries[0][len(prompts[0]):]
    share = sum(letter.isalnum() for letter in text) / max(1, len(text))
    return {"rewards": share, "scores": float(share > 0.4)}
'''
_STEPS, _PROMPTS, _SAMPLES = 6, 8, 8
_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip


def toy(folder: Path) -> list[str]:
    """Writes policy, prompts and reward function; the words of ``train`` for six steps of 8 prompts
    with 8 samples."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True)
    words = ["<|endoftext|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        BPE(vocab={token: number for number, token in enumerate(words)}, merges=[])
    )
    tokenizer.add_special_tokens(words[:2])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=words[0], eos_token=words[1]
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), **_SIZES)).float().save_pretrained(
        folder / "policy"
    )
    fast.save_pretrained(folder / "policy")
    sums = [
        {"question": f"{i} + {i + 1} = ", "answer": str(2 * i + 1)}
        for i in range(_STEPS * _PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in sums))
    (folder / "reward.py").write_text(_REWARD)
    given = {
        "config": shipped("configs/quickstart.yaml"),
        "actor.model_name_or_path": folder / "policy",
        "data.prompt_dataset": folder / "prompts.jsonl",
        "eval.dataset": folder / "prompts.jsonl",
        "eval.steps": 3,
        "eval.n_samples_per_prompt": 1,
        "reward.remote_url": folder / "reward.py",
        "rollout.batch_size": _PROMPTS,
        "rollout.n_samples_per_prompt": _SAMPLES,
        "rollout.max_new_tokens": 32,
        "train.batch_size": _SAMPLES * _PROMPTS,
        "train.micro_batch_size": 16,
        "rollout.micro_batch_size": 16,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]
