"""Prompts and their labels as a run uses them: formed, those that do not fit counted and skipped or
refused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf_ext.compat import get_tokenizer
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.records import Wanted, as_chat, read_records
from openrlhf_ext.driver.settings import policy_path
from openrlhf_ext.inputs import InputError, reading, require_one_beginning
from openrlhf_ext.options import required

logger = logging.getLogger(__name__)


class OverlongPromptError(ValueError):
    """Prompts are longer than the room left by the response, and ``data.overlong_prompts`` is
    ``error``."""


@dataclass(frozen=True)
class PromptData:
    """Prompts that fit, in the order of their records, with labels and ``datasource``; how many
    were skipped; where those that fit stand among all, from 0. A data set of torch."""

    prompts: list[str]
    labels: list[Any]
    sources: list[str]
    skipped_overlong: int
    places: Sequence[int]

    def first(self, count: int) -> PromptData:
        return replace(
            self,
            prompts=self.prompts[:count],
            labels=self.labels[:count],
            sources=self.sources[:count],
            skipped_overlong=0,
            places=self.places[:count],
        )

    @property
    def fingerprint(self) -> str:
        """Changes if a prompt, a label or their order changes: a place in the data means something
        for these only."""
        digest = hashlib.sha256()
        for prompt, label in zip(self.prompts, self.labels, strict=True):
            digest.update(repr((prompt, label)).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, row: int) -> tuple[str, str, Any]:
        return self.sources[row], self.prompts[row], self.labels[row]


def load_prompts(
    config: RunConfig,
    tokenizer: Any,
    paths: str,
    split: str | None,
    max_prompt_tokens: int,
    probabilities: str | None = None,
) -> PromptData:
    """Reads prompts and labels, without prompts of more than ``max_prompt_tokens`` tokens.

    Raises:
        OverlongPromptError: ``data.overlong_prompts`` is ``error``, and there are such prompts.
        InputError: records cannot be used.
        ValueError: nothing is left.
    """
    data = config.data
    wanted = Wanted(data.input_key, data.label_key, data.apply_chat_template)
    with reading(paths, "as data"):
        records = [
            *read_records(paths, split, wanted, data.max_samples, probabilities, config.train.seed)
        ]
    how = f"with data.input_key {wanted.prompt} and data.apply_chat_template {wanted.chat}"
    with reading(f"the prompts of {paths}", how):
        prompts = [
            _formed(record[wanted.prompt], data.input_template, wanted.chat, tokenizer)
            for record in records
        ]
    if empty := [i for i, prompt in enumerate(prompts) if not prompt]:
        raise InputError(
            f"{len(empty)} of {len(prompts)} prompts of {paths} are empty once they are formed, "
            f"the first is that of record {empty[0] + 1}; remove them"
        )
    tokens = tokenizer(prompts, add_special_tokens=False)["input_ids"] if prompts else []
    require_one_beginning(tokenizer, tokens, f"the prompts of {paths}")
    lengths = [*map(len, tokens)]
    keep = [i for i, n in enumerate(lengths) if n <= max_prompt_tokens]
    skipped = len(lengths) - len(keep)
    if skipped and data.overlong_prompts == "error":
        worst = max(range(len(lengths)), key=lengths.__getitem__)
        raise OverlongPromptError(
            f"{skipped} of {len(lengths)} prompts of {paths} are longer than data.max_len - "
            f"rollout.max_new_tokens = {max_prompt_tokens} tokens; the longest has "
            f"{lengths[worst]}: {prompts[worst][:200]!r}. Raise --data.max_len, lower "
            "--rollout.max_new_tokens, or set --data.overlong_prompts skip."
        )
    if not keep:
        raise ValueError(
            f"no prompt of {paths} fits data.max_len - rollout.max_new_tokens = "
            f"{max_prompt_tokens} tokens"
        )
    if skipped:
        logger.warning(
            "%s: skipped %d of %d prompts longer than %d tokens",
            paths,
            skipped,
            len(lengths),
            max_prompt_tokens,
        )
    label_key = wanted.label
    return PromptData(
        prompts=[prompts[i] for i in keep],
        labels=["" if label_key is None else records[i][label_key] for i in keep],
        sources=[str(records[i].get("datasource") or "default") for i in keep],
        skipped_overlong=skipped,
        places=keep,
    )


def _formed(prompt: Any, template: str | None, chat: bool, tokenizer: Any) -> str:
    """The text that is sampled from. Words such as ``<image>`` stay text: prompts have no other
    parts."""
    if chat:
        return str(
            tokenizer.apply_chat_template(
                as_chat(prompt), tokenize=False, add_generation_prompt=True
            )
        )
    return template.format(prompt) if template else prompt


def open_tokenizer(config: RunConfig) -> Any:
    """The policy's."""
    return get_tokenizer(policy_path(config), use_fast=not config.data.disable_fast_tokenizer)


def load_data(config: RunConfig, tokenizer: Any) -> tuple[PromptData, list[PromptData]]:
    """Training prompts, and those of each held-out set, that fit; warns of held-out prompts that
    are trained on."""
    data = config.data
    room = data.max_len - (config.rollout.max_new_tokens or 1)
    paths = required(data.prompt_dataset, "data.prompt_dataset")
    prompts = load_prompts(config, tokenizer, paths, data.prompt_split, room, data.prompt_probs)
    trained, held_out = {*prompts.prompts}, []
    for each in config.eval.sets:
        own_room = room if each.max_new_tokens is None else data.max_len - each.max_new_tokens
        found = load_prompts(config, tokenizer, each.paths, config.eval.split, own_room)
        if known := sum(prompt in trained for prompt in found.prompts):
            logger.warning(
                "eval.dataset%s: %.1f %% of its %d prompts are trained on: its accuracy is not "
                "held-out accuracy",
                f" {each.name}" if each.name else "",
                100 * known / len(found),
                len(found),
            )
        held_out.append(found)
    return prompts, held_out


def dataloader(data: PromptData, *, shuffle: bool = False, workers: int = 0) -> Any:
    """A loader that goes on where it was, one prompt at a time; as OpenRLHF makes it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        data,
        1,
        shuffle,
        drop_last=True,
        collate_fn=_alone,
        pin_memory=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def _alone(items: list[tuple[str, str, Any]]) -> tuple[str, str, Any]:
    return items[0]
