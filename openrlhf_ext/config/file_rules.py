"""Rules about the files that a run reads: they are there and hold what they should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from openrlhf_ext.config.errors import Violation
from openrlhf_ext.config.inputs import (
    InputError,
    count_records,
    faulty_records,
    first_record,
    require_definition,
    tokenizer_fault,
)
from openrlhf_ext.config.paths import DATA_SUFFIXES, DatasetRef, dataset_refs, is_http_url, is_hub_name, is_url

_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class RecordKeys:
    """What is read of a record: the prompt, the label if any; with ``chat`` the prompt may be a list of messages."""

    input_key: str
    label_key: str | None
    chat: bool


def dataset_violations(*, option: str, value: str, keys: RecordKeys) -> Iterator[Violation]:
    """Each dataset exists, and its first record has the keys and the prompt form that will be read."""
    for dataset in dataset_refs(value):
        if is_hub_name(dataset.path):
            continue
        if not Path(dataset.path).exists():
            yield Violation(
                (option,),
                f"{option}: {dataset.path} does not exist (a hub name has the form org/name)",
            )
        elif Path(dataset.path).is_file() and dataset.suffix not in (*DATA_SUFFIXES, ".py"):
            yield Violation(
                (option,),
                f"{option} must be one of {', '.join(DATA_SUFFIXES)}, a folder or a hub name: got {dataset.path}",
            )
        else:
            yield from _record_violations(option, dataset, keys)


def split_violations(*, option: str, split: str, dataset_option: str, value: str) -> Iterator[Violation]:
    """A data file is one split, which the reader calls train; what splits a folder or a hub name has is seen later."""
    for dataset in dataset_refs(value):
        if split != "train" and dataset.suffix in DATA_SUFFIXES and Path(dataset.path).is_file():
            yield Violation(
                (option, dataset_option),
                f"{option} must be train for a data file, which has no other split: got {split!r} and {dataset.path}; "
                f"leave {option} out",
            )


def template_violations(*, template: str | None, chat: bool) -> Iterator[Violation]:
    """The template puts the prompt somewhere, and nothing else does instead."""
    option, marker = "data.input_template", "<the prompt>"
    if template is None:
        return
    if chat:
        yield Violation(
            (option, "data.apply_chat_template"),
            f"{option} has no effect with data.apply_chat_template, which forms the whole prompt: got {template!r}; "
            "leave one of them out",
        )
    try:
        place = marker in template.format(marker)
    except (LookupError, ValueError, AttributeError, TypeError):
        place = False
    if not place:
        yield Violation(
            (option,),
            f"{option} must contain {{}}, where the prompt goes, and no other field (write {{{{ and }}}} for braces): "
            f"got {template!r}",
        )


def prompt_count_violations(*, datasets: str, max_samples: int, prompts: int) -> Iterator[Violation]:
    """There are prompts for one batch of rollouts; seen for .jsonl files only."""
    counts = [count_records(ref.path, prompts) for ref in dataset_refs(datasets)]
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and (have := min(sum(known), max_samples)) < prompts:
        yield Violation(
            ("data.prompt_dataset", "data.max_samples", "rollout.batch_size"),
            f"data.prompt_dataset (at most data.max_samples of it) must hold at least rollout.batch_size prompts: got "
            f"{have} and {prompts}; lower rollout.batch_size",
        )


def reward_violations(*, remote_url: str | None, agent_path: str | None) -> Iterator[Violation]:
    """There is exactly one source of rewards, and it is there."""
    both = ("reward.remote_url", "train.agent_func_path")
    if remote_url is None and agent_path is None:
        yield Violation(
            both,
            "a source of rewards is required: set reward.remote_url (a .py file with reward_func, or http URLs) or "
            "train.agent_func_path",
        )
    if remote_url is not None and agent_path is not None:
        yield Violation(
            both,
            f"reward.remote_url and train.agent_func_path exclude each other, an agent grades its own rollouts: got "
            f"{remote_url} and {agent_path}; keep one of them",
        )
    if agent_path is not None:
        yield from _definition_violations("train.agent_func_path", agent_path, "AgentExecutor")
    if remote_url is not None:
        yield from _remote_url_violations(remote_url)


def _record_violations(option: str, dataset: DatasetRef, keys: RecordKeys) -> Iterator[Violation]:
    try:
        record = first_record(dataset.path)
    except InputError as error:
        yield Violation((option,), f"{option}: {error}")
        return
    if record is None:
        return
    for key_option, key in (("data.input_key", keys.input_key), ("data.label_key", keys.label_key)):
        if key is not None and key not in record:
            yield Violation(
                (option, key_option),
                f"{key_option} must be a key of the records of {option}: got {key!r}, the first record of "
                f"{dataset.path} has {', '.join(record) or 'no keys'}",
            )
    prompt = record.get(keys.input_key) or ""
    if not isinstance(prompt, str) and not keys.chat:
        yield Violation(
            (option, "data.input_key", "data.apply_chat_template"),
            f"data.input_key must name a text unless data.apply_chat_template is on: {keys.input_key!r} in "
            f"{dataset.path} is a {type(prompt).__name__}; switch data.apply_chat_template on for lists of messages",
        )
    if keys.input_key in record:
        yield from _fault_violations(option, dataset.path, keys.input_key)


def _fault_violations(option: str, path: str, input_key: str) -> Iterator[Violation]:
    faults = list(islice(faulty_records(path, input_key), _FAULTS_SHOWN + 1))
    if faults:
        more = ", ..." if len(faults) > _FAULTS_SHOWN else ""
        yield Violation(
            (option,),
            f"{option}: every record of {path} must be a JSON object with a prompt: {', '.join(faults[:_FAULTS_SHOWN])}"
            f"{more}; mend or remove these lines",
        )


def tokenizer_violations(*, option: str, folder: str, chat: bool) -> Iterator[Violation]:
    """The model folder has a tokenizer, and a chat template where prompts go through one."""
    if (fault := tokenizer_fault(folder, chat=chat)) is not None:
        yield Violation((option,), f"{option}: {folder} {fault}")


def own_algorithm_violations(*, path: str | None) -> Iterator[Violation]:
    """The estimator custom has its file, which the controller then imports."""
    option = "algo.module_path"
    if path is None:
        yield Violation(
            (option, "algo.advantage.estimator"),
            f"{option} is required with algo.advantage.estimator custom: a .py file that registers an algorithm "
            "(docs/algorithms.md, Your own algorithm)",
        )
    elif not (path.endswith(".py") and Path(path).is_file()):
        yield Violation((option,), f"{option} must be a .py file that is there: got {path}")


def _definition_violations(option: str, path: str, name: str) -> Iterator[Violation]:
    if not path.endswith(".py"):
        yield Violation((option,), f"{option} must be a .py file: got {path}")
        return
    try:
        require_definition(path, name)
    except InputError as error:
        yield Violation((option,), f"{option}: {error}")


def _remote_url_violations(remote_url: str) -> Iterator[Violation]:
    option = "reward.remote_url"
    sources = remote_url.split(",")
    files = [source for source in sources if not is_url(source)]
    for url in sources:
        if is_url(url) and not is_http_url(url):
            yield Violation((option,), f"{option}: a URL must be http(s)://HOST[:PORT][/PATH], got {url}")
    if files and len(sources) > 1:
        yield Violation(
            (option,), f"{option} takes one .py file, or one or more http URLs separated by commas: got {remote_url}"
        )
    for path in files:
        yield from _definition_violations(option, path, "reward_func")
