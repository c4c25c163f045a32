"""From records to token ids, and which of them are trained on, read once by one rank: OpenRLHF's options and records.

Shape suffixes as in ``megatron.step.batch``: B = examples, M = tokens of all, R = ranges of trained tokens.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from openrlhf_ext.config.file_rules import wanted_examples
from openrlhf_ext.config.files import require_records
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.inputs import InputError, reading, require_one_beginning
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.options import required
from openrlhf_ext.sft.turns import Example, ExampleForm, Refused

logger = logging.getLogger(__name__)

_RECORDS_PER_PROCESS = 10_000
_FAULTS_SHOWN = 6
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
    tokenizer = get_tokenizer(path, "right", use_fast=not data.disable_fast_tokenizer)
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

    features = datasets.Features({
        "ids": datasets.List(datasets.Value("int32")), "ranges": datasets.List(datasets.List(datasets.Value("int64"))),
        "length": datasets.Value("int32"), "added": datasets.Value("string"), "fault": datasets.Value("string"),
    })  # fmt: skip
    from openrlhf_ext.compat import blending_datasets

    if not config.logger.verbose:
        datasets.disable_progress_bars()
    data, plain = config.data, config.model.pretrain_mode_enable
    with reading(paths, "as data"), redirect_stdout(None if config.logger.verbose else io.StringIO()):
        records = blending_datasets(
            paths, shares, strategy, config.train.seed, max_count=data.max_samples, dataset_split=split
        )
        records = records.select(range(min(data.max_samples, len(records))))
    wanted = wanted_examples(config)
    require_records(records, wanted, paths)
    if data.tokenizer_chat_template is not None:
        tokenizer.chat_template = data.tokenizer_chat_template
    form = ExampleForm(
        tokenizer=tokenizer, prompt_key=data.input_key, answer_key=wanted.label, max_len=data.max_len, plain=plain,
        input_template=data.input_template, chat=data.apply_chat_template, multiturn=data.multiturn,
    )  # fmt: skip
    processes = min(os.cpu_count() or 1, len(records) // _RECORDS_PER_PROCESS)
    with reading(paths, "as examples"):
        made = records.map(
            _row, fn_kwargs={"form": form}, remove_columns=records.column_names, num_proc=processes or None,
            features=features, load_from_cache_file=False,
        )  # fmt: skip
    _require_taken(made["fault"], paths, data.tokenizer_chat_template is not None)
    _say_what_is_left_out(made, paths, records.column_names, config)
    kept = made.filter(bool, input_columns="length", load_from_cache_file=False).with_format("numpy")
    if not any(map(len, kept["ranges"])):
        raise InputError(f"{paths} holds no example with a token to train on within data.max_len {data.max_len}")
    sequences = [row.astype(np.int32) for row in kept["ids"]]
    require_one_beginning(tokenizer, sequences, f"the examples of {paths}")
    return sequence_batch(sequences, [row.tolist() for row in kept["ranges"]])


def _row(record: dict[str, Any], form: ExampleForm) -> dict[str, Any]:
    """An example as ``datasets`` keeps it; without ids if there is none."""
    try:
        example = form.example(record) or Example([], [])
    except Refused as error:
        return {"ids": [], "ranges": [], "length": 0, "added": "", "fault": str(error)}
    facts = {"length": len(example.ids), "added": example.added, "fault": ""}
    return {"ids": example.ids, "ranges": example.ranges, **facts}


def _require_taken(faults: list[str], paths: str, given: bool) -> None:
    """Raises InputError: examples cannot be trained on exactly."""
    refused = [f"record {number} {fault}" for number, fault in enumerate(faults, start=1) if fault]
    if refused:
        template = "data.tokenizer_chat_template" if given else "the tokenizer's chat template"
        more = f"; {len(refused)} of {len(faults)} records are like this" if len(refused) > _FAULTS_SHOWN else ""
        raise InputError(f"{paths}, with {template}: {'; '.join(refused[:_FAULTS_SHOWN])}{more}")


def _say_what_is_left_out(made: Any, paths: str, columns: list[str], config: SupervisedConfig) -> None:
    if skipped := sum(not length for length in made["length"]):
        logger.warning(
            "%s: skipped %d of %d examples without an answer, or whose prompt leaves no room for one within "
            "data.max_len %d", paths, skipped, len(made), config.data.max_len,
        )  # fmt: skip
    if written := [added for added in made["added"] if added]:
        logger.warning(
            "%s: the chat template writes %r before the answer of %d of %d examples, which no record says: it is not "
            "trained on; put it into the records if it should be", paths, written[0], len(written), len(made),
        )  # fmt: skip
    if config.data.apply_chat_template and "tools" in columns:
        logger.warning("%s: the key 'tools' is not read: put the tools into a system message", paths)


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
    tokens_M, lengths_B, ranges_R2, ranges_B = (
        torch.from_numpy(np.load(folder / f"{name}.{part}.npy", mmap_mode="c")) for part in _PARTS
    )
    return SequenceBatch(tokens_M, lengths_B, ranges_R2, ranges_B)
