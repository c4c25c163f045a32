"""From records to token ids, and which of them are trained on: OpenRLHF's SFTDataset, read once by one rank.

Shape suffixes as in ``megatron.step.batch``: B = examples, M = tokens of all, R = ranges of trained tokens.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from openrlhf_ext.config.files import Wanted, require_records
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.inputs import InputError, reading
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.options import required

logger = logging.getLogger(__name__)

_RECORDS_PER_PROCESS = 10_000
_PARTS = ("tokens_M", "lengths_B", "ranges_R2", "ranges_B")


def read_examples(config: SupervisedConfig) -> tuple[SequenceBatch, SequenceBatch | None]:
    """The examples of data.dataset and of eval.dataset as token ids. Raises InputError: records cannot be used, or
    nothing is left."""
    # late: one rank reads, the others need no OpenRLHF
    from openrlhf_ext.compat import DriverStrategy, get_tokenizer, quiet_upstream_logs

    if not config.logger.verbose:
        quiet_upstream_logs()
    data = config.data
    args = SimpleNamespace(data=data, use_ms=False)
    strategy = DriverStrategy(args)
    path = required(config.model.model_name_or_path, "model.model_name_or_path")
    tokenizer = get_tokenizer(path, None, "right", strategy, use_fast=not data.disable_fast_tokenizer)
    examples = _tokenized(
        config, required(data.dataset, "data.dataset"), data.dataset_split, data.dataset_probs, strategy, tokenizer
    )
    held_out = None
    if config.eval.dataset is not None:
        held_out = _tokenized(config, config.eval.dataset, config.eval.split, None, strategy, tokenizer)
    return examples, held_out


def _tokenized(
    config: SupervisedConfig, paths: str, split: str, shares: str | None, strategy: Any, tokenizer: Any
) -> SequenceBatch:
    import datasets

    from openrlhf_ext.compat import SFTDataset, blending_datasets

    if not config.logger.verbose:
        datasets.disable_progress_bars()
    data, plain = config.data, config.model.pretrain_mode_enable
    with reading(paths, "as data"), redirect_stdout(None if config.logger.verbose else io.StringIO()):
        records = blending_datasets(
            paths, shares, strategy, config.train.seed, max_count=data.max_samples, dataset_split=split
        )
        records = records.select(range(min(data.max_samples, len(records))))
    wanted = Wanted(data.input_key, None if plain else data.output_key, data.apply_chat_template, not plain)
    require_records(records, wanted, paths)
    processes = min(os.cpu_count() or 1, len(records) // _RECORDS_PER_PROCESS)
    with reading(paths, "as examples"):
        dataset = SFTDataset(
            records, tokenizer, data.max_len, strategy, input_template=None if plain else data.input_template,
            pretrain_mode=plain, num_processors=processes or None, multiturn=data.multiturn,
        )  # fmt: skip
        made = [(ids[0].numpy().astype(np.int32), [*_ranges(mask[0].numpy())]) for ids, _, mask in dataset]
    if skipped := len(records) - len(made):
        logger.warning(
            "%s: skipped %d of %d examples without an answer, or whose prompt leaves no room for one within "
            "data.max_len %d", paths, skipped, len(records), data.max_len,
        )  # fmt: skip
    if not any(ranges for _, ranges in made):
        raise InputError(f"{paths} holds no example with a token to train on within data.max_len {data.max_len}")
    return sequence_batch([ids for ids, _ in made], [ranges for _, ranges in made])


def _ranges(mask_S: np.ndarray) -> Iterator[tuple[int, int]]:
    """[start, stop) of the tokens that are trained on. OpenRLHF's mask is that of the positions that predict them."""
    trained = np.concatenate([[0, 0], mask_S[:-1] > 0, [0]]).astype(np.int8)  # nothing stands before the first token
    edges = np.flatnonzero(np.diff(trained))
    yield from ((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))



def fingerprint(examples: SequenceBatch) -> str:
    """Changes if a token, what is trained on, or the order changes."""
    digest = hashlib.sha256()
    for part in _PARTS:
        digest.update(getattr(examples, part).numpy().tobytes())
    return digest.hexdigest()


def save_examples(folder: Path, name: str, examples: SequenceBatch) -> None:
    """For the other ranks, which map the files instead of holding copies."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in _PARTS:
        np.save(folder / f"{name}.{part}.npy", getattr(examples, part).numpy())


def load_examples(folder: Path, name: str) -> SequenceBatch | None:
    """None: none were saved under this name."""
    if not (folder / f"{name}.{_PARTS[0]}.npy").exists():
        return None
    # copy on write: torch warns of memory that cannot be written, and nobody writes
    parts = [np.load(folder / f"{name}.{part}.npy", mmap_mode="c") for part in _PARTS]
    return SequenceBatch(*map(torch.from_numpy, parts))
