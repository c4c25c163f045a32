"""Prompt datasets: OpenRLHF's, with prompts that do not fit counted and skipped or refused."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

from openrlhf_ext.compat import DriverStrategy, PromptDataset, blending_datasets, get_tokenizer
from openrlhf_ext.config import RunConfig
from openrlhf_ext.config.files import Wanted, require_records
from openrlhf_ext.config.upstream import upstream_args
from openrlhf_ext.driver.evaluation import HeldOut
from openrlhf_ext.driver.rollouts import all_prompts
from openrlhf_ext.driver.settings import policy_path
from openrlhf_ext.inputs import InputError, reading, require_one_beginning
from openrlhf_ext.options import required

logger = logging.getLogger(__name__)


class OverlongPromptError(ValueError):
    """Prompts are longer than the room left by the response, and ``data.overlong_prompts`` is ``error``."""


@dataclass(frozen=True)
class PromptData:
    """A dataset of prompts that fit, how many were skipped, and where those that fit stand among all, from 0."""

    dataset: PromptDataset
    skipped_overlong: int
    places: Sequence[int]

    def first(self, count: int) -> PromptData:
        return PromptData(_keep(copy(self.dataset), range(min(count, len(self)))), 0, self.places[:count])

    @property
    def fingerprint(self) -> str:
        """Changes if a prompt, a label or their order changes: a place in the data means something for these only."""
        digest = hashlib.sha256()
        for prompt, label in zip(self.dataset.prompts, self.dataset.labels, strict=True):
            digest.update(repr((prompt, label)).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.dataset)


def load_prompts(
    paths: str, split: str, strategy: DriverStrategy, tokenizer: Any, *, probabilities: str | None,
    max_prompt_tokens: int, overlong: Literal["skip", "error"],
) -> PromptData:  # fmt: skip
    """Reads prompts and labels as OpenRLHF does, without prompts of more than ``max_prompt_tokens`` tokens. Raises
    OverlongPromptError (``overlong`` is 'error'); InputError: records cannot be used; ValueError: nothing is left."""
    args = strategy.args
    with reading(paths, "as data"):
        records = blending_datasets(
            paths, probabilities, strategy, args.train.seed, max_count=args.data.max_samples, dataset_split=split
        )
        records = records.select(range(min(args.data.max_samples, len(records))))
    wanted = Wanted(args.data.input_key, args.data.label_key, args.data.apply_chat_template)
    require_records(records, wanted, paths)
    how = f"with data.input_key {wanted.prompt} and data.apply_chat_template {wanted.chat}"
    with reading(f"the prompts of {paths}", how):
        dataset = PromptDataset(records, tokenizer, strategy, input_template=args.data.input_template)
    if empty := [i for i, prompt in enumerate(dataset.prompts) if not prompt]:
        raise InputError(
            f"{len(empty)} of {len(dataset.prompts)} prompts of {paths} are empty once they are formed, the first is "
            f"that of record {empty[0] + 1}; remove them"
        )
    tokens = tokenizer(dataset.prompts, add_special_tokens=False)["input_ids"]
    require_one_beginning(tokenizer, tokens, f"the prompts of {paths}")
    lengths = [*map(len, tokens)]
    keep = [i for i, n in enumerate(lengths) if n <= max_prompt_tokens]
    skipped = len(lengths) - len(keep)
    if skipped and overlong == "error":
        worst = max(range(len(lengths)), key=lengths.__getitem__)
        raise OverlongPromptError(
            f"{skipped} of {len(lengths)} prompts of {paths} are longer than data.max_len - rollout.max_new_tokens = "
            f"{max_prompt_tokens} tokens; the longest has {lengths[worst]}: {dataset.prompts[worst][:200]!r}. "
            "Raise --data.max_len, lower --rollout.max_new_tokens, or set --data.overlong_prompts skip."
        )
    if not keep:
        raise ValueError(
            f"no prompt of {paths} fits data.max_len - rollout.max_new_tokens = {max_prompt_tokens} tokens"
        )
    if skipped:
        logger.warning(
            "%s: skipped %d of %d prompts longer than %d tokens", paths, skipped, len(lengths), max_prompt_tokens
        )
    return PromptData(_keep(dataset, keep), skipped, keep)


def _keep(dataset: PromptDataset, rows: Sequence[int]) -> PromptDataset:
    for name in ("prompts", "labels", "images", "datasources"):
        values = getattr(dataset, name)
        setattr(dataset, name, [values[i] for i in rows])
    return dataset


def open_tokenizer(config: RunConfig) -> tuple[DriverStrategy, Any]:
    """What OpenRLHF's data sets are read with: its options, and the policy's tokenizer."""
    strategy, path = DriverStrategy(upstream_args(config)), policy_path(config)
    return strategy, get_tokenizer(path, use_fast=not config.data.disable_fast_tokenizer)


def load_data(config: RunConfig, strategy: DriverStrategy, tokenizer: Any) -> tuple[PromptData, list[PromptData]]:
    """Training prompts, and those of each held-out set, that fit."""
    data, overlong = config.data, config.data.overlong_prompts
    room = data.max_len - (config.rollout.max_new_tokens or 1)
    paths = required(data.prompt_dataset, "data.prompt_dataset")
    prompts = load_prompts(
        paths, data.prompt_split, strategy, tokenizer, probabilities=data.prompt_probs, max_prompt_tokens=room,
        overlong=overlong,
    )  # fmt: skip
    held_out = [
        load_prompts(
            each.paths, config.eval.split, strategy, tokenizer, probabilities=None, overlong=overlong,
            max_prompt_tokens=room if each.max_new_tokens is None else data.max_len - each.max_new_tokens,
        )
        for each in config.eval.sets
    ]  # fmt: skip
    return prompts, held_out


def held_out_sets(config: RunConfig, strategy: DriverStrategy, data: Sequence[PromptData]) -> list[HeldOut]:
    """The held-out sets with their prompts, as :func:`load_data` read them."""
    return [
        HeldOut(options, all_prompts(dataloader(strategy, own), own.places))
        for options, own in zip(config.eval.sets, data, strict=True)
    ]


def dataloader(strategy: DriverStrategy, data: PromptData, *, shuffle: bool = False, workers: int = 0) -> Any:
    """OpenRLHF's resumable loader, one prompt at a time."""
    return strategy.setup_dataloader(data.dataset, 1, True, shuffle, data.dataset.collate_fn, num_workers=workers)
