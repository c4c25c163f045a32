"""Rules about files: what a run reads is there and holds what it should, what it writes can be
written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrlhf_ext.config.files import (
    DATA_SUFFIXES,
    dataset_refs,
    inputs_of,
    is_http_url,
    is_hub_name,
    is_url,
    parameter_count,
    require_definition,
)
from openrlhf_ext.config.records import CHAT, Scan, Wanted, open_source, scan_records
from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.config.tokenizers import tokenizer_fault
from openrlhf_ext.config.trained import TrainedConfig
from openrlhf_ext.inputs import InputError, similar_path, split_inputs
from openrlhf_ext.options import Violation, leaf_fields, value_of
from openrlhf_ext.options.sections.evaluation import named_parts
from openrlhf_ext.redaction import HIDDEN, lacks_a_secret

# a violation has its options and its words, as in a table

_FAULTS_SHOWN = 5
_REMEDIES = {
    "reward_func": "; define reward_func(queries, prompts, labels, **kwargs)",
    "AgentExecutor": "; to turn an environment with step() into an agent, define class "
    "AgentExecutor(MultiTurnAgentExecutor), whose __init__ calls "
    "super().__init__(YourEnvironment) (docs/agents.md)",
}
# what a run writes, and whether it is a folder
_OUTPUTS = {
    "ckpt.path": True,
    "ckpt.output_dir": True,
    "logger.tensorboard_dir": True,
    "logger.metrics_path": False,
    "logger.figure_path": False,
}
# written in the folder of logger.metrics_path
_BESIDE_METRICS = ("events.jsonl", "samples.jsonl", "eval_samples.jsonl")
# bytes per parameter: the weights, and Adam's two moments in fp32; fp32 master weights beside bf16
# ones
_WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
_RESUMABLE_BYTES = {"fp32": 4 + 8, "bf16": 2 + 4 + 8}
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def file_violations(config: RunConfig) -> Iterator[Violation]:
    """All of them, but those about the models (``rules.model_violations``)."""
    if not config.dry_run:  # whose verdict says it
        yield from not_given(config)
    yield from _hidden_violations(config)
    yield from _reward_violations(config.reward.remote_url, config.train.agent_func_path)
    for _, grader in (
        named_parts(config.eval.remote_url) if config.eval.remote_url is not None else ()
    ):
        yield from _remote_url_violations("eval.remote_url", grader)
    yield from _prompt_violations(config)
    yield from output_violations(config)
    yield from _space_violations(config)


def not_given(config: RunConfig) -> Iterator[Violation]:
    """Prompts and a source of rewards are given: what a recipe leaves to its user."""
    if config.data.prompt_dataset is None:
        yield Violation(
            ("data.prompt_dataset",),
            "data.prompt_dataset is required: a .jsonl file of prompts, a folder or a hub name",
        )
    if not (config.has_reward_model or config.reward.remote_url or config.train.agent_func_path):
        yield Violation(
            ("reward.remote_url", "train.agent_func_path", "reward.model_name_or_path"),
            "a source of rewards is required: set reward.remote_url (a .py file with "
            "reward_func, or http URLs), train.agent_func_path or reward.model_name_or_path",
        )


def _hidden_violations(config: RunConfig) -> Iterator[Violation]:
    for name, _ in leaf_fields(type(config)):
        if lacks_a_secret(value := value_of(config, name)):
            yield Violation(
                (name,),
                f"{name} must be a complete address: got {value}, in which a dry run or a "
                f"checkpoint's config.yaml replaced a password by {HIDDEN}; write the password "
                "there",
            )


# ---- what is read


def _prompt_violations(config: RunConfig) -> Iterator[Violation]:
    data = config.data
    wanted = Wanted(data.input_key, data.label_key, data.apply_chat_template)
    if data.prompt_dataset is not None:
        counts: list[int | None] = []
        yield from dataset_violations(
            "data.prompt_dataset", data.prompt_dataset, data.prompt_split, wanted, counts
        )
        yield from _prompt_count_violations(counts, data.max_samples, config.rollout.batch_size)
    if config.eval.paths is not None:
        yield from dataset_violations(
            "eval.dataset", config.eval.paths, config.eval.split, wanted, []
        )


def dataset_violations(
    option: str, value: str, split: str | None, wanted: Wanted, counts: list[int | None]
) -> Iterator[Violation]:
    """Each dataset exists, and all of its records have the keys and the prompt form that will be
    read.

    ``counts`` gets the number of records of each dataset, None where it is not known.
    """
    for dataset in dataset_refs(value):
        counts.append(None)
        if is_hub_name(dataset.path):
            continue
        if not Path(dataset.path).exists():
            near = similar_path(dataset.path)
            said = (
                f"{option}: {dataset.path} does not exist (a hub name has the form org/name){near}"
            )
            yield Violation((option,), said)
        elif Path(dataset.path).is_file() and not dataset.is_file:
            forms = f"one of {', '.join(DATA_SUFFIXES)}, a folder or a hub name"
            yield Violation((option,), f"{option} must be {forms}: got {dataset.path}")
        else:
            try:
                scan = scan_records(open_source(dataset, split), wanted)
            except InputError as error:
                yield Violation((option,), f"{option}: {error}")
                continue
            yield from _record_violations(option, dataset.path, scan, wanted)
            counts[-1] = scan.records if not scan.faults else None


def _prompt_count_violations(
    counts: Sequence[int | None], max_samples: int, prompts: int
) -> Iterator[Violation]:
    """There are prompts for one batch of rollouts, where all datasets are files."""
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and (have := min(sum(known), max_samples)) < prompts:
        yield Violation(
            ("data.prompt_dataset", "data.max_samples", "rollout.batch_size"),
            "data.prompt_dataset (at most data.max_samples of it) must hold at least "
            f"rollout.batch_size prompts: got {have} and {prompts}; lower rollout.batch_size",
        )


def _reward_violations(remote_url: str | None, agent_path: str | None) -> Iterator[Violation]:
    """There are no two sources of rewards, and the one that is given is there."""
    both = ("reward.remote_url", "train.agent_func_path")
    if remote_url is not None and agent_path is not None:
        yield Violation(
            both,
            "reward.remote_url and train.agent_func_path cannot be used together, because an "
            f"agent grades its own rollouts: got {remote_url} and {agent_path}; keep one of them",
        )
    if agent_path is not None:
        yield from _definition_violations(
            "train.agent_func_path", agent_path, "AgentExecutor", "run_agent"
        )
    if remote_url is not None:
        yield from _remote_url_violations("reward.remote_url", remote_url)


def _record_violations(option: str, path: str, scan: Scan, wanted: Wanted) -> Iterator[Violation]:
    missing = False
    for key_option, key in (("data.input_key", wanted.prompt), (wanted.label_option, wanted.label)):
        if key is not None and key not in scan.keys:
            missing = True
            yield Violation(
                (option, key_option),
                f"{key_option} must be a key of the records of {option}: got {key!r}, but the "
                f"first record of {path} has {', '.join(scan.keys) or 'no keys'}",
            )
    if missing:  # every record would be complained about
        return
    if scan.faults:
        more = ", ..." if len(scan.faults) > _FAULTS_SHOWN else ""
        label = (
            "" if wanted.label is None else f" and a label ({wanted.label_option} {wanted.label})"
        )
        remedy = "fix or remove these records"
        if all(CHAT in fault for fault in scan.faults):
            remedy = f"set {CHAT} if the prompts are chats"
        yield Violation(
            (option,),
            f"{option}: every record of {path} must be a JSON object with a prompt "
            f"(data.input_key {wanted.prompt}){label}: "
            f"{', '.join(scan.faults[:_FAULTS_SHOWN])}{more}; {remedy}",
        )


def tokenizer_violations(option: str, folder: str, *, chat: bool) -> Iterator[Violation]:
    if (fault := tokenizer_fault(folder, chat=chat)) is not None:
        yield Violation((option,), f"{option}: {folder} {fault}")


def _definition_violations(option: str, path: str, *names: str) -> Iterator[Violation]:
    if not path.endswith(".py"):
        yield Violation((option,), f"{option} must be a .py file: got {path}")
        return
    try:
        require_definition(path, *names)
    except InputError as error:
        yield Violation((option,), f"{option}: {error}{_REMEDIES[names[0]]}")


def _remote_url_violations(option: str, remote_url: str) -> Iterator[Violation]:
    sources = [*split_inputs(remote_url)]
    files = [source for source in sources if not is_url(source)]
    for url in sources:
        if is_url(url) and not is_http_url(url):
            yield Violation(
                (option,), f"{option}: a URL must be http(s)://HOST[:PORT][/PATH], got {url}"
            )
    if files and len(sources) > 1:
        yield Violation(
            (option,),
            f"{option} takes one .py file, or one or more http URLs separated by commas: got "
            f"{remote_url}",
        )
    for path in files:
        yield from _definition_violations(option, path, "reward_func", "reward_funcs")


# ---- what is written


@dataclass(frozen=True)
class Output:
    """What a run writes: the files of a folder, or one file."""

    option: str
    path: str
    is_folder: bool

    @property
    def folder(self) -> Path:
        """The folder that is written into, links resolved."""
        return Path(self.path).resolve() if self.is_folder else Path(self.path).resolve().parent


def output_violations(config: TrainedConfig) -> Iterator[Violation]:
    paths = [
        (option, value_of(config, option), is_folder) for option, is_folder in _OUTPUTS.items()
    ]
    outputs = [
        Output(option, path, is_folder) for option, path, is_folder in paths if path is not None
    ]
    for output in outputs:
        yield from _writable_violations(output)
    if isinstance(config, RunConfig) and config.has_critic and config.critic.save_value_network:
        outputs.append(
            Output("critic.save_value_network", f"{config.ckpt.output_dir}_critic", True)
        )
    folder = Path(str(config.logger.metrics_path)).parent
    beside = [Output("logger.metrics_path", str(folder / name), False) for name in _BESIDE_METRICS]
    files = [output for output in outputs if not output.is_folder]
    yield from _reserved_violations(files, beside)
    outputs += beside
    models = _local((option, value_of(config, option)) for option in config.model_options)
    yield from _model_overlap_violations(outputs, models, config.ckpt.path)
    read = (*config.data_options, *config.code_options)
    sources = [
        (option, ref.path) for option in read for ref in dataset_refs(inputs_of(config, option))
    ]
    yield from _source_overlap_violations(outputs, _local(sources))
    yield from _same_file_violations(files)


def _reserved_violations(files: Sequence[Output], beside: Sequence[Output]) -> Iterator[Violation]:
    taken = [Path(output.path).resolve() for output in beside]
    for output in files:
        if (path := Path(output.path).resolve()) in taken:
            yield Violation(
                (output.option, "logger.metrics_path"),
                f"{output.option} must not be {path.name} in the folder of logger.metrics_path, "
                f"which the run writes itself: got {output.path}; choose another name",
            )


def _local(named: Iterable[tuple[str, str | None]]) -> list[tuple[str, str]]:
    return [
        (option, path)
        for option, path in named
        if path and not is_url(path) and not is_hub_name(path)
    ]


def _writable_violations(output: Output) -> Iterator[Violation]:
    """The path can be written: the nearest folder that exists is one, and is writable."""
    place = Path(output.path) if output.is_folder else Path(output.path).parent
    existing = _existing(place)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is a file"
        yield Violation(
            (output.option,),
            f"{output.option} must be writable: got {output.path}, but {existing} {reason}",
        )


def _model_overlap_violations(
    outputs: Sequence[Output], models: Sequence[tuple[str, str]], checkpoints: str
) -> Iterator[Violation]:
    """A final checkpoint replaces the weights in its folder; ``global_step*`` below ``ckpt.path``
    are deleted."""
    kept = Path(checkpoints).resolve()
    for option, path in models:
        model = Path(path).resolve()
        yield from _overlap(
            [o for o in outputs if o.folder == model],
            option,
            path,
            "the folder of the model that is",
        )
        if kept in model.parents and model.relative_to(kept).parts[0].startswith("global_step"):
            yield Violation(
                ("ckpt.path", option),
                f"{option} must not be a checkpoint in ckpt.path, where checkpoints are moved "
                f"and deleted: got {path} and {checkpoints}; choose another ckpt.path or copy "
                "the model",
            )


def _source_overlap_violations(
    outputs: Sequence[Output], sources: Sequence[tuple[str, str]]
) -> Iterator[Violation]:
    """Data and code are not overwritten; every file of a folder of data is read as data."""
    for option, path in sources:
        source = Path(path).resolve()
        if source.is_dir():
            hits = [
                output for output in outputs if source in (output.folder, *output.folder.parents)
            ]
            yield from _overlap(hits, option, path, "the folder of data that is")
        else:
            hits = [output for output in outputs if Path(output.path).resolve() == source]
            yield from _overlap(hits, option, path, "the file that is")


def _same_file_violations(files: Sequence[Output]) -> Iterator[Violation]:
    for output in files:
        if Path(output.path).is_dir():
            yield Violation(
                (output.option,), f"{output.option} must be a file, but {output.path} is a folder"
            )
    if len({Path(output.path).resolve() for output in files}) < len(files):
        yield Violation(
            tuple(output.option for output in files),
            f"{' and '.join(output.option for output in files)} must be different files: got "
            f"{files[0].path}",
        )


def _overlap(outputs: Sequence[Output], option: str, path: str, what: str) -> Iterator[Violation]:
    """One violation for everything that would be written into the same input."""
    if outputs:
        names = list(dict.fromkeys(output.option for output in outputs))
        yield Violation(
            (*names, option),
            f"{', '.join(names)} would write into {what} read by {option}: {path}; choose "
            "another place",
        )


def _space_violations(config: RunConfig) -> Iterator[Violation]:
    """There is room for the final weights, and for a checkpoint, which further ones replace."""
    if (sizes := written_bytes(config)) is None:
        return
    asked: dict[int, int] = {}  # bytes by disk
    options = ("ckpt.output_dir", "ckpt.path") if config.ckpt.saves else ("ckpt.output_dir",)
    for option, size in zip(options, sizes, strict=False):
        path = str(value_of(config, option))
        place = _existing(Path(path))
        if not place.is_dir():
            continue
        disk, free = place.stat().st_dev, shutil.disk_usage(place).free
        asked[disk] = asked.get(disk, 0) + size
        if asked[disk] <= free:
            continue
        if option == "ckpt.output_dir":
            what, hint = f"the final weights take about {_readable(size)}", ""
        else:
            with_final = f" ({_readable(asked[disk])} with the final weights, on the same disk)"
            both = "" if asked[disk] == size else with_final
            what = f"a checkpoint takes about {_readable(size)}{both}"
            hint = " (up to ckpt.max_num + 1 of them exist at a time)"
        yield Violation(
            (option,) if option == "ckpt.output_dir" else (option, "ckpt.save_steps"),
            f"{what}, but the disk of {option} {path} has only {_readable(free)} free; use "
            f"another {option} or free disk space{hint}",
        )


def written_bytes(config: RunConfig) -> tuple[int, int] | None:
    """Of the final Hugging Face checkpoints, and of one checkpoint, about; None where the policy's
    files are not here to be counted."""
    if (policy := parameter_count(config.actor.model_name_or_path)) is None:
        return None
    critic = (parameter_count(config.critic_model) or policy) if config.has_critic else 0
    resumable, weights = (
        table[config.megatron.param_dtype] for table in (_RESUMABLE_BYTES, _WEIGHT_BYTES)
    )
    final = policy + (critic if config.critic.save_value_network else 0)
    kept = 0 if config.ckpt.disable_ds else (policy + critic) * resumable
    return final * weights, kept + (policy * weights if config.ckpt.save_hf else 0)


def _existing(folder: Path) -> Path:
    return next((f for f in (folder, *folder.parents) if f.exists()), Path("/"))


def _readable(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:.1f} {name}"
