from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GPT2Config, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.tools.evaluate.sampling import Completion, max_prompt_tokens, sample_completions
from tests.tools.evaluate.conftest import POSITIONS

PROMPTS = ["1+2=?", "3=?", "12+34+56=?", "9"]


def sample(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], **options: Any
) -> list[list[Completion]]:
    return sample_completions(model, tokenizer, prompts, Evaluate(**{"n_samples": 1, **options}))


def greedy_alone(model: Qwen2ForCausalLM, ids: list[int], count: int, eos: int) -> list[int]:
    """The most likely continuation, one prompt at a time, without cache or padding."""
    new: list[int] = []
    while len(new) < count and (not new or new[-1] != eos):
        logits = model(torch.tensor([ids + new])).logits[0, -1]
        new.append(int(logits.argmax()))
    return new


@torch.no_grad()
def test_batching_and_padding_change_nothing(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = sample(model, tokenizer, PROMPTS, temperature=0, max_new_tokens=12, batch_size=3)
    model.eval()
    for prompt, (completion,) in zip(PROMPTS, found, strict=True):
        expected = greedy_alone(model, tokenizer(prompt)["input_ids"], 12, tokenizer.eos_token_id)
        assert completion.text == tokenizer.decode(expected)
        assert completion.query == prompt + completion.text
        assert completion.tokens == len(expected)
        assert completion.truncated == (expected[-1] != tokenizer.eos_token_id)


@torch.no_grad()
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.5)])
def test_samples_follow_the_distribution_of_the_options_alone(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, temperature: float, top_p: float
) -> None:
    draws = 4000
    (found,) = sample(
        model,
        tokenizer,
        ["1+2=?"],
        n_samples=draws,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=1,
        batch_size=draws,
    )
    logits = model.eval()(torch.tensor([tokenizer("1+2=?")["input_ids"]])).logits[0, -1]
    expected = (logits / temperature).softmax(-1)
    ranked, order = expected.sort(descending=True)
    expected[order[ranked.cumsum(0) - ranked >= top_p]] = 0
    expected /= expected.sum()
    counts = Counter(completion.text for completion in found)
    for token, probability in enumerate(expected.tolist()):
        error = (probability * (1 - probability) / draws) ** 0.5
        assert counts[tokenizer.decode([token])] / draws == pytest.approx(
            probability, abs=5 * error
        )


def test_a_completion_ends_with_its_end_token(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = sample(model, tokenizer, PROMPTS, n_samples=20, temperature=3.0, max_new_tokens=30)
    completions = [completion for group in found for completion in group]
    finished = [completion for completion in completions if not completion.truncated]
    assert finished and all(completion.text.count("<|im_end|>") == 1 for completion in finished)
    assert all(completion.text.endswith("<|im_end|>") for completion in finished)
    assert all(completion.tokens == 30 for completion in completions if completion.truncated)


def test_every_prompt_gets_its_samples(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = sample(model, tokenizer, PROMPTS, n_samples=5, max_new_tokens=4, batch_size=3)
    for prompt, group in zip(PROMPTS, found, strict=True):
        assert len(group) == 5 and all(completion.query.startswith(prompt) for completion in group)


def test_the_seed_decides_and_nothing_global_changes(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    model.train()
    own_config, state, threads = (
        model.generation_config,
        torch.random.get_rng_state(),
        torch.get_num_threads(),
    )
    first, again, other = (
        sample(model, tokenizer, PROMPTS, n_samples=3, max_new_tokens=8, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert model.training and model.generation_config is own_config
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads


def test_the_room_for_prompts_is_that_of_the_stretched_window() -> None:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    assert (
        max_prompt_tokens(Qwen2Config(max_position_embeddings=32, rope_parameters=yarn), 8) == 120
    )
    tables = {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("full_attention", "sliding_attention")
    }
    several = Qwen2Config(max_position_embeddings=32)
    several.rope_parameters = tables
    assert max_prompt_tokens(several, 8) == 24
    assert max_prompt_tokens(GPT2Config(n_positions=64), 8) == 56, (
        "by another name, without rotary embedding"
    )


@pytest.mark.parametrize("prompt", ["", "1" * (POSITIONS - 7)])
def test_a_prompt_that_does_not_fit_is_named(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str
) -> None:
    assert max_prompt_tokens(model.config, 8) == POSITIONS - 8
    with pytest.raises(
        ValueError, match=f"between 1 and {POSITIONS - 8} tokens.* has {len(prompt)}"
    ):
        sample(model, tokenizer, ["1", prompt], max_new_tokens=8)


def test_no_prompts_no_completions(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert sample(model, tokenizer, []) == []
