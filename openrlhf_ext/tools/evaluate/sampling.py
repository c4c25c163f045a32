"""Sampling completions for checkpoints outside a run, with plain transformers or with a vLLM engine
given to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from openrlhf_ext.megatron.model.hf_files import end_tokens, saved_generation_config
from openrlhf_ext.megatron.model.positions import window_of
from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.rollout.response import derived_seed

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

_SMALL_MODEL_PARAMETERS = 20_000_000

# Shape suffixes: B = sequences in a batch, S = longest of them, P = longest prompt, T = prompt and
# completion.


@dataclass(frozen=True)
class Completion:
    """One sampled completion; what is not known or measured is ``None``.

    Attributes:
        query: prompt and completion as one text, special tokens kept (what a reward function gets).
        text: the completion alone, special tokens kept.
        body: the same without the token that ended it.
        tokens: its length, end-of-sequence token included.
        truncated: it reached ``max_new_tokens`` without an end-of-sequence token.
    """

    query: str
    text: str
    body: str
    tokens: int | None
    truncated: bool | None


class Sampler(Protocol):
    async def sample(self, prompts: Sequence[str], places: Sequence[int]) -> list[list[Completion]]:
        """Completions of some prompts, in the given order: a function of the arguments and of
        nothing sampled before.

        Seeds are derived from ``places``, where the problems stand in the file.
        """


class TransformersSampler:
    """Samples with ``generate`` of a model in memory, the seed derived from the first prompt's
    place."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Evaluate
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._options = options

    async def sample(self, prompts: Sequence[str], places: Sequence[int]) -> list[list[Completion]]:
        options = self._options.model_copy(
            update={"seed": derived_seed(self._options.seed, places[0])}
        )
        return sample_completions(self._model, self._tokenizer, prompts, options)


class CompletionEngine(Protocol):
    """What an engine offers; ``rollout.in_process.OfflineEngine`` does."""

    async def complete(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        top_p: float,
        max_tokens: int,
        stop_token_ids: list[int],
    ) -> list[list[int]]:
        """Sampled tokens for each prompt's tokens, end of sequence included."""


class EngineSampler:
    """Samples with an engine; every completion has a seed of its own, derived from (seed, problem,
    sample).

    The checkpoint's ``generation_config.json`` names more tokens that end a completion.
    """

    def __init__(
        self, engine: CompletionEngine, tokenizer: PreTrainedTokenizerBase, options: Evaluate
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._options = options
        self._eos = _eos_ids(saved_generation_config(Path(options.model or "")), tokenizer)

    async def sample(self, prompts: Sequence[str], places: Sequence[int]) -> list[list[Completion]]:
        options = self._options
        count = options.n_samples
        prompt_ids = self._tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        repeated = []
        seeds = []
        for ids, place in zip(prompt_ids, places, strict=True):
            repeated += [ids] * count
            seeds += [derived_seed(options.seed, place, sample) for sample in range(count)]
        sampled = await self._engine.complete(
            repeated,
            seeds,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.max_new_tokens,
            stop_token_ids=self._eos,
        )

        found = iter(sampled)
        completions = []
        for ids in prompt_ids:
            own = islice(found, count)
            completions.append(
                [_completion(self._tokenizer, ids, new_ids, self._eos) for new_ids in own]
            )
        return completions


def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    options: Evaluate,
) -> list[list[Completion]]:
    """Completions of each prompt, in the given order; no special tokens are added. The model is
    moved to the device.

    The model's own sampling defaults (top-k, repetition penalty, ...) are not used: the
    distribution is exactly that of the options, as in a rollout. The same seed, batch size and
    device give the same completions; the global random state is left as it was. Raises ValueError:
    a prompt is empty or leaves no room for ``max_new_tokens``.
    """
    prompt_ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"] if prompts else []
    _check_lengths(prompts, prompt_ids, max_prompt_tokens(model.config, options.max_new_tokens))
    config = _generation_config(model, tokenizer, options)
    # Prompts of similar length share a batch, and so do the copies of one. The longest come first,
    # so that the largest batch fails for memory at once rather than at the end.
    rows = [*range(len(prompts))] * options.n_samples
    rows.sort(key=lambda row: (len(prompt_ids[row]), row), reverse=True)
    completions: list[list[Completion]] = [[] for _ in prompts]
    nn.Module.to(model, options.device)  # transformers' own wrapper of it has no type
    with (
        _evaluating(model, config),
        _seeded(options.seed, torch.device(options.device)),
        threads_for(model),
    ):
        for start in range(0, len(rows), options.batch_size):
            batch = rows[start : start + options.batch_size]
            generated = _generate(model, [prompt_ids[row] for row in batch], config)
            for row, new_ids in zip(batch, generated, strict=True):
                completions[row].append(
                    _completion(tokenizer, prompt_ids[row], new_ids, config.eos_token_id)
                )
    return completions


def max_prompt_tokens(config: PreTrainedConfig, max_new_tokens: int) -> int | None:
    """Longest prompt that leaves room for the completion; ``None`` where the model states no
    limit."""
    # some classes call the entry otherwise, and answer to the usual name
    positions = getattr(config, "max_position_embeddings", None)
    window = window_of({**config.to_dict(), "max_position_embeddings": positions})
    return None if window is None else window - max_new_tokens


def _check_lengths(prompts: Sequence[str], prompt_ids: list[list[int]], limit: int | None) -> None:
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not ids or (limit is not None and len(ids) > limit):
            raise ValueError(
                f"a prompt must have between 1 and {limit} tokens (max_position_embeddings - "
                f"max_new_tokens), this one has {len(ids)}: {prompt[:200]!r}"
            )


def _eos_ids(saved: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if not (found := end_tokens(saved, tokenizer)):
        raise ValueError(
            "neither the tokenizer nor the generation config names an end-of-sequence token"
        )
    return found


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: Evaluate
) -> GenerationConfig:
    from transformers import GenerationConfig

    eos = _eos_ids(model.generation_config, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": 0,
        }
    return GenerationConfig(
        max_new_tokens=options.max_new_tokens, eos_token_id=eos, pad_token_id=pad, **sampling
    )


@contextmanager
def _evaluating(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Evaluation mode, and no defaults of the model that ``generate`` would mix into ``config``."""
    was_training = model.training
    own_config = model.generation_config
    model.eval()
    model.generation_config = config
    try:
        yield
    finally:
        model.train(was_training)
        model.generation_config = own_config


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def threads_for(model: PreTrainedModel) -> Iterator[None]:
    """One CPU thread for a small model: its operations are shorter than a barrier of threads on a
    busy machine."""
    before = torch.get_num_threads()
    if model.device.type == "cpu" and model.num_parameters() < _SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _generate(
    model: PreTrainedModel, prompt_ids: list[list[int]], config: GenerationConfig
) -> list[list[int]]:
    """Token ids after each prompt, padding behind the end included."""
    ids_BP, mask_BP = left_padded(prompt_ids, config.pad_token_id)
    device = model.device
    generate: Any = model.generate  # transformers gives it two types
    ids_BT: Tensor = generate(
        ids_BP.to(device), attention_mask=mask_BP.to(device), generation_config=config
    )
    return ids_BT[:, ids_BP.shape[1] :].tolist()


def left_padded(sequences: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids with padding in front, (B, S) int64, and a mask of the same shape, 1 where there is
    none."""
    longest = max(map(len, sequences))
    ids_BS = torch.full((len(sequences), longest), pad, dtype=torch.long)
    mask_BS = torch.zeros_like(ids_BS)
    for row, ids in enumerate(sequences):
        ids_BS[row, longest - len(ids) :] = torch.tensor(ids)
        mask_BS[row, longest - len(ids) :] = 1
    return ids_BS, mask_BS


def _completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[int],
    new_ids: list[int],
    stops: Sequence[int],
) -> Completion:
    end = next((position + 1 for position, token in enumerate(new_ids) if token in stops), None)
    kept = new_ids[:end]
    body = kept if end is None else kept[:-1]
    return Completion(
        query=str(tokenizer.decode(prompt_ids + kept, skip_special_tokens=False)),
        text=str(tokenizer.decode(kept, skip_special_tokens=False)),
        body=str(tokenizer.decode(body, skip_special_tokens=False)),
        tokens=len(kept),
        truncated=end is None,
    )
