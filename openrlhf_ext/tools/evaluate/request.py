"""What a command asks to be evaluated, and everything that is wrong with it, before a model is
loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from openrlhf_ext.config.load import Draft, collect, read_command_line, read_files, typed
from openrlhf_ext.config.show import format_help
from openrlhf_ext.config.tokenizers import tokenizer_fault
from openrlhf_ext.inputs import (
    INTEGER,
    NUMBER,
    TEXT,
    InputError,
    check,
    decode,
    list_of,
    map_of,
    map_with,
    or_null,
    read_json,
    read_text,
    reading,
)
from openrlhf_ext.megatron.model.adapter import base_of, is_adapter
from openrlhf_ext.megatron.model.folder import require_one_model, require_tied_head
from openrlhf_ext.options import ConfigError, Violation, is_set
from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.options.table import table_of
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.rewards.counting import powers_of_two
from openrlhf_ext.tools.evaluate.problems import (
    MATHS,
    Problem,
    PromptStyle,
    Task,
    digest_of,
    load_benchmark,
    load_completions,
    load_problems,
    read_results,
    system_message,
    task_settings,
)
from openrlhf_ext.tools.evaluate.protocols import MATH_TEMPLATE, PROTOCOLS, SYSTEM_PROMPTS, listed

_SAMPLING = (
    "temperature",
    "top_p",
    "max_new_tokens",
    "batch_size",
    "seed",
    "engine",
    "dtype",
    "device",
)
_ENGINE = ("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_mib")

# what is read of an earlier result (--json, or the only one of results.json)
_SAMPLE_ANSWER = map_with({"prompt": TEXT, "completion": TEXT, "score": NUMBER})
_RESULT = {
    "accuracy": NUMBER,
    "standard_error": or_null(NUMBER),
    "prompts": INTEGER,
    "samples_per_prompt": INTEGER,
    "score_mean": NUMBER,
}
_RESULT_MAYBE = {
    "benchmark": TEXT,
    "skipped_overlong": INTEGER,
    "pass_at_k": map_of(NUMBER),
    "majority_at_k": map_of(NUMBER),
    "sample_answers": list_of(_SAMPLE_ANSWER),
}

_BENCHMARK_TOKENS = 1024  # a worked solution; in 64 tokens no model ends one


def load_request(argv: Sequence[str]) -> Request:
    """What the words of a command ask for. Raises ConfigError: lists everything that is wrong with
    them, with the files that they name, or with the folder of the results."""
    table = table_of(Evaluate)
    line = read_command_line(argv, table)
    if line.help_filter is not None:
        sys.stdout.write(
            f"{format_help(line.help_filter, model=Evaluate)}\nprotocols:\n{listed()}\n"
        )
        raise SystemExit(0)
    settings, broken = read_files(line.config_files, table)
    draft = Draft(table, [*line.violations, *broken])
    collect(draft, [*settings, *line.settings])
    for name, value in _usual_values(draft.values).items():
        if draft.values.get(name) is None:
            draft.values[name] = value
    request = Request(typed(draft, Evaluate))
    draft.violations += [
        each for each in request.violations() if draft.tainted.isdisjoint(each.options)
    ]
    if not draft.violations:
        draft.violations += request.conflicts()
    if draft.violations:
        raise ConfigError(draft.violations)
    return request


def _usual_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of options that are not given: those of the protocol; of saved completions it only says where
    answers stand."""
    usual = {"max_new_tokens": _BENCHMARK_TOKENS} if given.get("benchmark") else {}
    protocol = PROTOCOLS.get(str(given.get("protocol")))
    return usual | (
        protocol.options if protocol is not None and not given.get("completions") else {}
    )


class Request:
    """What the options of the command ask for; files are read once, when they are first needed."""

    def __init__(self, options: Evaluate) -> None:
        self.options = options

    def violations(self) -> Iterator[Violation]:
        """What is wrong with the options, and with each of the files."""
        given = self.options
        yield from given.violations()
        if given.out and Path(given.out).exists() and not Path(given.out).is_dir():
            yield Violation(("out",), f"--out must be a folder: {given.out} is none")
        if (
            given.device.startswith("cuda")
            and not has_cuda()
            and (given.engine != "vllm" or given.device == "cuda")
        ):
            none = "torch finds no CUDA device on this machine; --device cpu is the default"
            yield Violation(("device",), f"--device {given.device}: {none}")
        yield from _faults("compare", lambda: self.before)
        yield from self._model_violations()
        wrong_files = self._tasks[1]
        yield from wrong_files
        if not given.completions:
            yield from _faults("k", lambda: self.ks(given.n_samples), "n_samples")
        elif not wrong_files:
            yield from _faults("completions", lambda: self.completions)

    def conflicts(self) -> Iterator[Violation]:
        """What in itself is right, and does not belong together: an earlier result, the folder of
        the results."""
        yield from _faults("compare", lambda: self._require_same_problems(self.tasks[0]))
        if self.options.out:
            for task, settings in zip(self.tasks, self.settings, strict=True):
                path = Path(self.options.out) / f"{task.name}.jsonl"
                yield from _faults("out", partial(read_results, path, settings))

    def _model_violations(self) -> Iterator[Violation]:
        given = self.options
        if (model := given.model) is None:
            return
        # a name would be looked for on the hub, for a minute without a network
        if not Path(model).is_dir():
            yield Violation(
                ("model",),
                f"--model must be a folder with a Hugging Face checkpoint: {model} is none",
            )
            return
        if (fault := tokenizer_fault(model, chat=given.apply_chat_template)) is not None:
            yield Violation(("model",), f"--model: {model} {fault}")
        elif not given.completions:
            yield from _faults("model", lambda: _vocabulary_size(model))

    def _require_same_problems(self, task: Task) -> None:
        """Raises ValueError if an earlier result says that it is of others."""
        before, problems = self.before or {}, len(task.problems)
        then = before.get("prompts", problems) + before.get("skipped_overlong", 0)
        name = before.get("benchmark", task.name)
        if (name, then) != (task.name, problems):
            raise ValueError(
                f"{self.options.compare} is of {then} problems of {name}, this is of {problems} of "
                f"{task.name}: give an earlier result of the same problems (--limit)"
            )

    @cached_property
    def before(self) -> dict[str, Any] | None:
        path = self.options.compare
        if path is None:
            return None
        value = decode(read_text(path), str(path))
        if isinstance(value, list) and len(value) == 1:  # results.json
            value = value[0]
        return check(
            value,
            str(path),
            _RESULT,
            _RESULT_MAYBE,
            "give a file of --json, or results.json of one task",
        )

    @property
    def protocol_note(self) -> str:
        """Which protocol was followed, and where it was not; "" without one."""
        given, name = self.options, self.options.protocol
        if name is None:
            return ""
        asked = {} if given.completions else PROTOCOLS[name].options
        pairs = [(option, getattr(given, option), meant) for option, meant in asked.items()]
        instead = [
            f"--{option} {value!r} instead of {meant!r}"
            for option, value, meant in pairs
            if value != meant
        ]
        return f"protocol {name}" + (f", but {', '.join(instead)}" if instead else "")

    def ks(self, samples: int) -> list[int]:
        """Sizes of pass@k and maj@k. Raises ValueError: one is above the number of a prompt's
        completions."""
        ks = sorted(set(self.options.k or powers_of_two(samples)))
        if above := [k for k in ks if k > samples]:
            raise ValueError(
                f"must be at most the completions of a prompt (--n): got {above} of {samples}"
            )
        return ks

    @property
    def tasks(self) -> list[Task]:
        return self._tasks[0]

    @cached_property
    def _tasks(self) -> tuple[list[Task], list[Violation]]:
        """The tasks, and what is wrong with their files and prompts."""
        given = self.options
        # a chat template replaces the template of a user's own data, as in OpenRLHF; in a
        # benchmark's it goes around it
        usual = "{}" if given.system_prompt in SYSTEM_PROMPTS else MATH_TEMPLATE
        template = (given.input_template or usual) if given.benchmark else given.input_template
        if given.data and given.apply_chat_template and given.protocol is None:
            template = None
        answers = PROTOCOLS[given.protocol].answers if given.protocol is not None else "any"
        style = PromptStyle(template=template, chat=given.apply_chat_template)
        faults = (
            [Violation(("input_template",), fault)] if (fault := style.fault()) is not None else []
        )
        try:
            style = replace(style, system_prompt=system_message(given.system_prompt))
        except InputError as error:
            faults.append(Violation(("system_prompt",), str(error)))
        tasks: dict[str, Task] = {}

        def load(name: str, path: str, read: Callable[[], list[Problem]]) -> None:
            problems = read()
            if name in tasks:
                raise ValueError(f"{name} is given twice")
            tasks[name] = Task(name, path, problems, given.reward or MATHS, style, answers)

        for spec in given.benchmark:
            name, equals, path = spec.partition("=")
            read = partial(load_benchmark, name, path, given.limit)
            wrong = Violation(("benchmark",), f"--benchmark must be NAME=FILE: got {spec!r}")
            faults += _faults("benchmark", partial(load, name, path, read)) if equals else [wrong]
        if given.data:
            keys = given.input_key, given.label_key
            read = partial(load_problems, given.data, *keys, given.limit, given.apply_chat_template)
            faults += _faults("data", partial(load, Path(given.data).stem, given.data, read))
        return list(tasks.values()), faults

    @cached_property
    def completions(self) -> list[list[str]]:
        given = self.options
        found = load_completions(given.completions or "", self.tasks[0].problems)
        samples = len(found[0])
        if is_set(given, "n_samples") and given.n_samples != samples:
            raise ValueError(f"there are {samples} of each problem: got --n {given.n_samples}")
        self.ks(samples)
        return found

    @cached_property
    def settings(self) -> list[dict[str, Any]]:
        given = self.options
        names = [*_SAMPLING, *(_ENGINE if given.engine == "vllm" else ())]
        sampling = {"n": given.n_samples, **{name: getattr(given, name) for name in names}}
        return [
            task_settings(task, sampling, given.model, given.completions) for task in self.tasks
        ]

    @cached_property
    def out(self) -> Path | None:
        """Where everything is kept: the folder of --out; without it and --json one named after
        settings and files."""
        given = self.options
        if given.out or given.json_file:
            return Path(given.out) if given.out else None
        source = (
            Path(given.completions).stem
            if given.completions
            else Path(given.model or "").resolve().name
        )
        name = "-".join([source, *(task.name for task in self.tasks), digest_of(self.settings)[:8]])
        return Path("runs/evaluation") / name

    def store_path(self, name: str) -> Path | None:
        return self.out / f"{name}.jsonl" if self.out else None


def _faults(option: str, read: Callable[[], Any], *others: str) -> list[Violation]:
    """What is wrong with what an option names, which ``read`` reads."""
    try:
        read()
    except (ValueError, OSError) as error:
        return [
            Violation((option, *others), f"--{option}: {line}") for line in str(error).splitlines()
        ]
    return []


def _vocabulary_size(folder: str) -> int:
    from transformers import AutoConfig

    folder = base_of(folder) if is_adapter(folder) else folder
    require_one_model(folder)
    require_tied_head(folder)
    file = Path(folder) / "config.json"
    read_json(file)  # transformers would look for a name on the hub
    with reading(file, "by transformers"):
        return int(
            AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config().vocab_size
        )
