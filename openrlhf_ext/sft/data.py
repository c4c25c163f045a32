"""From records to token ids, and which of them are trained on, read once by one rank: OpenRLHF's
options and records.

Shape suffixes as in ``megatron.step.batch``: B = examples, M = tokens of all, R = ranges of trained
tokens.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_ext.config.records import read_records
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.sft_rules import wanted_examples
from openrlhf_ext.inputs import InputError, reading, require_one_beginning
from openrlhf_ext.megatron.step.batch import SequenceBatch, sequence_batch
from openrlhf_ext.options import required
from openrlhf_ext.sft.gauges import known_fraction
from openrlhf_ext.sft.turns import Example, ExampleForm, Refused

logger = logging.getLogger(__name__)

_RECORDS_IN_ONE_PROCESS = 10_000
_RECORDS_OF_A_TASK = 256
_FAULTS_SHOWN = 6
_PARTS = ("tokens_M", "lengths_B", "ranges_R2", "ranges_B")
_form: ExampleForm


def read_examples(config: SupervisedConfig) -> tuple[SequenceBatch, SequenceBatch | None]:
    """The examples of data.dataset and of eval.dataset as token ids. Raises InputError: records
    cannot be used, or nothing is left."""
    # late: one rank reads, the others need no OpenRLHF
    from openrlhf_ext.compat import get_tokenizer, quiet_upstream_logs

    if not config.logger.verbose:
        quiet_upstream_logs()
    data = config.data
    path = required(config.model.model_name_or_path, "model.model_name_or_path")
    tokenizer = get_tokenizer(path, "right", use_fast=not data.disable_fast_tokenizer)
    if data.tokenizer_chat_template is not None:
        tokenizer.chat_template = data.tokenizer_chat_template
    paths = required(data.dataset, "data.dataset")
    examples = _tokenized(config, paths, data.dataset_split, data.dataset_probs, tokenizer)
    held_out = None
    if config.eval.dataset is not None:
        held_out = _tokenized(config, config.eval.dataset, config.eval.split, None, tokenizer)
        if known := known_fraction(held_out, examples):
            logger.warning(
                "eval.dataset: %.1f %% of its examples are also in the training data", 100 * known
            )
    return examples, held_out


def _tokenized(
    config: SupervisedConfig, paths: str, split: str | None, shares: str | None, tokenizer: Any
) -> SequenceBatch:
    data, wanted = config.data, wanted_examples(config)
    form = ExampleForm(
        tokenizer=tokenizer,
        prompt_key=data.input_key,
        answer_key=wanted.label,
        max_len=data.max_len,
        plain=config.model.pretrain_mode_enable,
        input_template=data.input_template,
        chat=data.apply_chat_template,
        multiturn=data.multiturn,
        end_cut=data.cut_answers == "end",
    )
    records = read_records(paths, split, wanted, data.max_samples, shares, config.train.seed)
    with reading(paths, "as examples"):
        made = [*_made(records, form)]
    _require_taken(
        [each if isinstance(each, str) else "" for each in made],
        paths,
        data.tokenizer_chat_template,
    )
    examples = [each for each in made if isinstance(each, Example) and each.ids]
    _say_what_is_left_out(examples, len(made), paths, config)
    if not any(example.ranges for example in examples):
        raise InputError(
            f"{paths} holds no example with a token to train on within data.max_len {data.max_len}"
        )
    require_one_beginning(
        tokenizer, [example.ids for example in examples], f"the examples of {paths}"
    )
    sequences = [np.array(example.ids, np.int32) for example in examples]
    return sequence_batch(sequences, [example.ranges for example in examples])


def _made(records: Iterator[dict[str, Any]], form: ExampleForm) -> Iterator[Example | str | None]:
    """What becomes of each record, in several processes where there are many."""
    first = [*islice(records, _RECORDS_IN_ONE_PROCESS)]
    processes = os.cpu_count() or 1
    if len(first) < _RECORDS_IN_ONE_PROCESS or processes == 1:
        _of_process(form)
        yield from map(_example, chain(first, records))
        return
    # forked: the tokenizer is there already; the feeding thread reads records as fast as they are
    # taken
    with multiprocessing.get_context("fork").Pool(processes, _of_worker, (form,)) as pool:
        yield from pool.imap(_example, chain(first, records), chunksize=_RECORDS_OF_A_TASK)


def _of_worker(form: ExampleForm) -> None:
    # the pool ends its processes by SIGTERM and waits for them; the handler that they inherit would
    # not end them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _of_process(form)


def _of_process(form: ExampleForm) -> None:
    global _form
    _form = form


def _example(record: dict[str, Any]) -> Example | str | None:
    """An example; None: the record has no answer or no room for one; a text: why it is refused."""
    try:
        return _form.example(record)
    except Refused as error:
        return str(error)


def _require_taken(faults: list[str], paths: str, template: str | None) -> None:
    """Raises InputError: examples cannot be trained on exactly."""
    refused = [f"record {number} {fault}" for number, fault in enumerate(faults, start=1) if fault]
    if refused:
        with_template = (
            "the tokenizer's chat template" if template is None else "data.tokenizer_chat_template"
        )
        more = (
            f"; {len(refused)} of {len(faults)} records are like this"
            if len(refused) > _FAULTS_SHOWN
            else ""
        )
        raise InputError(
            f"{paths}, with {with_template}: {'; '.join(refused[:_FAULTS_SHOWN])}{more}"
        )


def _say_what_is_left_out(
    examples: list[Example], records: int, paths: str, config: SupervisedConfig
) -> None:
    data = config.data
    if skipped := records - len(examples):
        logger.warning(
            "%s: skipped %d of %d examples without an answer, or whose prompt leaves no room "
            "for one within data.max_len %d",
            paths,
            skipped,
            records,
            data.max_len,
        )
    if cut := sum(example.cut for example in examples):
        how = (
            "still ends in the end token"
            if data.cut_answers == "end"
            else "does not end in the end token"
        )
        logger.warning(
            "%s: cut %d of %d examples at data.max_len %d: what is left of the answer %s "
            "(data.cut_answers %s)",
            paths,
            cut,
            records,
            data.max_len,
            how,
            data.cut_answers,
        )
    if written := [example.added for example in examples if example.added]:
        logger.warning(
            "%s: the chat template writes %r before the answer of %d of %d examples, which is not "
            "in the records: it is not trained on; add it to the records if it should be",
            paths,
            written[0],
            len(written),
            records,
        )


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
