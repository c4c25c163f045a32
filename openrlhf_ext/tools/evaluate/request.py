"""What a command asks to be evaluated, and everything that is wrong with it, before a model is loaded."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from openrlhf_ext.config.files import tokenizer_difference, tokenizer_fault
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
from openrlhf_ext.patches.environment import has_cuda
from openrlhf_ext.rewards.counting import powers_of_two
from openrlhf_ext.tools.evaluate.problems import (
    MATHS,
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
from openrlhf_ext.tools.evaluate.protocols import MATH_TEMPLATE, PROTOCOLS, SYSTEM_PROMPTS, settle

_SAMPLING = ("temperature", "top_p", "max_new_tokens", "batch_size", "seed", "engine", "dtype", "device", "greedy")
_ENGINE = ("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_mib")

# what is read of an earlier result (--json, or the only one of results.json)
_SAMPLE_ANSWER = map_with({"prompt": TEXT, "completion": TEXT, "score": NUMBER})
_RESULT = {
    "accuracy": NUMBER, "standard_error": or_null(NUMBER), "prompts": INTEGER, "samples_per_prompt": INTEGER,
}  # fmt: skip
_RESULT_MAYBE = {
    "benchmark": TEXT, "skipped_overlong": INTEGER,
    "score_mean": NUMBER, "greedy_accuracy": or_null(NUMBER), "pass_at_k": map_of(NUMBER),
    "majority_at_k": map_of(NUMBER), "sample_answers": list_of(_SAMPLE_ANSWER),
}  # fmt: skip

_SHARE = (lambda value: 0 < value <= 1, "above 0 and at most 1")
_SECONDS = (lambda value: 0 < value < math.inf, "a positive number of seconds")
_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0, "at least 0"), "top_p": _SHARE, "gpu_memory_utilization": _SHARE,
    "reward_timeout_s": _SECONDS, "engine_timeout_s": _SECONDS,
    "num_workers": (lambda value: value <= 2**8, "at most 256"),
    "kv_cache_mib": (lambda value: value <= 2**20, "at most 1048576"),
}  # fmt: skip


class Request:
    """What the options of the command ask for; files are read once, when they are first needed."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.instead = settle(arguments)
        """What was given besides a protocol and wins over it."""

    def faults(self) -> Iterator[str]:
        given = self.arguments
        found = [*self._usage_faults(), *self._number_faults(), *self._model_faults(), *self._measure_faults()]
        tasks, wrong_files = self._tasks
        found += wrong_files
        if given.completions:
            if not wrong_files and Path(given.completions).is_file():
                found += self._attempt(lambda: self.completions)
        else:
            found += self._sample_faults(self.samples)
        if tasks and not wrong_files and not found:
            found += self._compared_faults(tasks[0])
        if given.out and not found:
            for task, settings in zip(tasks, self.settings, strict=True):
                found += self._attempt(partial(read_results, Path(given.out) / f"{task.name}.jsonl", settings))
        yield from found

    def _usage_faults(self) -> Iterator[str]:
        given = self.arguments
        if bool(given.benchmark) == bool(given.data):
            yield "give either --benchmark NAME=FILE (one or several), or --data FILE with --reward"
        if given.data and not given.reward:
            yield "--data needs --reward, which says what a right answer is"
        if given.data and not Path(given.data).is_file():
            yield f"--data: there is no file {given.data}"
        if given.completions and len(given.benchmark) > 1:
            yield f"--completions belong to one benchmark: got {len(given.benchmark)}; grade them one after the other"
        if given.completions and not Path(given.completions).is_file():
            yield f"--completions: there is no file {given.completions}"
        if given.min_gain is not None and given.compare is None:
            yield "--min_gain needs --compare"
        yield from (f"--compare: {fault}" for fault in self._attempt(lambda: self.before))
        comparing = [name for name in ("compare", "expect_accuracy") if getattr(given, name) is not None]
        if comparing and len(given.benchmark) > 1:
            yield f"--{comparing[0]} is for one problem file: got {len(given.benchmark)} benchmarks"

    def _number_faults(self) -> Iterator[str]:
        given = self.arguments
        for name, (holds, words) in _BOUNDS.items():
            if not holds(value := getattr(given, name)):
                yield f"--{name} must be {words}: got {value:g}"
        if given.out and Path(given.out).exists() and not Path(given.out).is_dir():
            yield f"--out must be a folder: {given.out} is none"
        if given.engine == "vllm" and given.device not in ("cpu", "cuda"):
            which = "CUDA_VISIBLE_DEVICES chooses the GPUs"
            yield f"--device must be cpu or cuda with --engine vllm: got {given.device}; {which}"
        elif given.device.startswith("cuda") and not has_cuda():
            yield f"--device {given.device}: torch finds no CUDA device on this machine; --device cpu is the default"

    def _model_faults(self) -> Iterator[str]:
        given = self.arguments
        if given.model is None:
            if not given.completions:
                yield "give --model (a checkpoint to sample from), or --completions (saved ones)"
            elif given.apply_chat_template:
                yield "--apply_chat_template with --completions needs --model, whose tokenizer has the template"
        elif not Path(given.model).is_dir():  # a name would be looked for on the hub, for a minute without a network
            yield f"--model must be a folder with a Hugging Face checkpoint: {given.model} is none"
        else:
            if (fault := tokenizer_fault(given.model, chat=given.apply_chat_template)) is not None:
                yield f"--model: {given.model} {fault}"
            elif not given.completions:
                yield from self._attempt(lambda: _vocabulary_size(given.model))

    def _measure_faults(self) -> Iterator[str]:
        given = self.arguments
        if given.completions:
            if asked := [name for name in ("greedy", "short_tokens", "entropy", "reference") if getattr(given, name)]:
                remedy = "sample them with --model instead of --completions"
                yield f"--{', --'.join(asked)}: --completions has texts without tokens; {remedy}"
            return
        if given.short_tokens is not None and given.short_tokens >= given.max_new_tokens:
            most = f"--max_new_tokens ({given.max_new_tokens}), where every completion is short"
            yield f"--short_tokens must be below {most}: got {given.short_tokens}"
        if self._measures:
            option = "--entropy" if given.reference is None else "--reference"
            if given.engine == "vllm":
                yield f"{option} needs a model in plain transformers: give --engine transformers, got vllm"
            if given.temperature == 0:
                yield f"{option} needs --temperature above 0, where tokens are drawn from a distribution: got 0"
        if given.reference is not None and not Path(given.reference).is_dir():
            yield f"--reference must be a folder with a Hugging Face checkpoint: {given.reference} is none"
        elif given.reference is not None and given.model is not None and Path(given.model).is_dir():
            yield from self._attempt(lambda: _require_one_vocabulary(given.model, given.reference))

    def _sample_faults(self, samples: int) -> Iterator[str]:
        if above := [k for k in self.ks(samples) if k > samples]:
            yield f"--k must be at most the completions of a prompt (--n): got {above} of {samples}"

    def _compared_faults(self, task: Task) -> Iterator[str]:
        """An earlier result is of the same problems, as far as it says."""
        before, problems = self.before or {}, len(task.problems)
        then = before.get("prompts", problems) + before.get("skipped_overlong", 0)
        name = before.get("benchmark", task.name)
        if (name, then) != (task.name, problems):
            yield (f"--compare: {self.arguments.compare} is of {then} problems of {name}, this is of {problems} of "
                f"{task.name}: give an earlier result of the same problems (--limit)")  # fmt: skip

    @cached_property
    def before(self) -> dict[str, Any] | None:
        path = self.arguments.compare
        if path is None:
            return None
        value = decode(read_text(path), str(path))
        if isinstance(value, list) and len(value) == 1:  # results.json
            value = value[0]
        found = check(value, str(path), _RESULT, _RESULT_MAYBE, "give a file of --json, or results.json of one task")
        if "score_mean" not in found:  # of a version whose accuracy was the mean score; its pass@1 went by right ones
            found["score_mean"] = found["accuracy"]
            found["accuracy"] = found.get("pass_at_k", {}).get("1", found["accuracy"])
        return found

    @staticmethod
    def _attempt(read: Callable[[], Any]) -> list[str]:
        try:
            read()
        except (ValueError, OSError) as error:
            return str(error).splitlines()
        return []

    @property
    def _measures(self) -> bool:
        """Whether the model has to be asked once more for every completion."""
        return self.arguments.entropy or self.arguments.reference is not None

    @property
    def protocol_note(self) -> str:
        """Which protocol was followed, and where it was not; "" without one."""
        name = self.arguments.protocol
        if name is None:
            return ""
        return f"protocol {name}" + (f", but {', '.join(self.instead)}" if self.instead else "")

    @property
    def samples(self) -> int:
        return self.arguments.n_samples or 4

    def ks(self, samples: int) -> list[int]:
        return sorted(set(self.arguments.k or powers_of_two(samples)))

    @property
    def tasks(self) -> list[Task]:
        return self._tasks[0]

    @cached_property
    def _tasks(self) -> tuple[list[Task], list[str]]:
        given = self.arguments
        # a chat template replaces the template of a user's own data, as in OpenRLHF; in a benchmark's it goes around it
        usual = "{}" if given.system_prompt in SYSTEM_PROMPTS else MATH_TEMPLATE
        template = (given.input_template or usual) if given.benchmark else given.input_template
        if given.data and given.apply_chat_template and given.protocol is None:
            template = None
        answers = PROTOCOLS[given.protocol].answers if given.protocol is not None else "any"
        style = PromptStyle(template=template, chat=given.apply_chat_template)
        faults = [fault] if (fault := style.fault()) is not None else []
        try:
            style = replace(style, system_prompt=system_message(given.system_prompt))
        except InputError as error:
            faults.append(str(error))
        tasks: dict[str, Task] = {}

        def load() -> None:
            if data:
                problems = load_problems(path, given.input_key, given.label_key, given.limit, given.apply_chat_template)
            else:
                problems = load_benchmark(name, path, given.limit)
            if name in tasks:
                raise ValueError(f"--benchmark: {name} is given twice")
            tasks[name] = Task(name, path, problems, given.reward or MATHS, style, answers)

        for spec in given.benchmark:
            name, equals, path = spec.partition("=")
            data = False
            faults += self._attempt(load) if equals else [f"--benchmark must be NAME=FILE: got {spec!r}"]
        if given.data and Path(given.data).is_file():
            name, path, data = Path(given.data).stem, given.data, True
            faults += self._attempt(load)
        return list(tasks.values()), faults

    @cached_property
    def completions(self) -> list[list[str]]:
        found = load_completions(self.arguments.completions, self.tasks[0].problems)
        samples = len(found[0])
        faults = list(self._sample_faults(samples))
        if self.arguments.n_samples not in (None, samples):
            faults.append(f"--n {self.arguments.n_samples} is not what --completions has of each problem: {samples}")
        if faults:
            raise ValueError("\n".join(faults))
        return found

    @cached_property
    def settings(self) -> list[dict[str, Any]]:
        given = self.arguments
        names = [*_SAMPLING, *(_ENGINE if given.engine == "vllm" else ())]
        sampling = {"n": self.samples, **{name: getattr(given, name) for name in names}, "entropy": self._measures}
        return [task_settings(task, sampling, given.model, given.completions, given.reference) for task in self.tasks]

    @cached_property
    def out(self) -> Path | None:
        """Where everything is kept: the folder of --out; without it and --json one named after settings and files."""
        given = self.arguments
        if given.out or given.json:
            return Path(given.out) if given.out else None
        source = Path(given.completions).stem if given.completions else Path(given.model).resolve().name
        name = "-".join([source, *(task.name for task in self.tasks), digest_of(self.settings)[:8]])
        return Path("runs/evaluation") / name

    def store_path(self, name: str) -> Path | None:
        return self.out / f"{name}.jsonl" if self.out else None


def _require_one_vocabulary(model: str, reference: str) -> None:
    """Raises ValueError unless the same token of two checkpoints has the same number, as far as their files tell."""
    sizes = [_vocabulary_size(folder) for folder in (model, reference)]
    remedy = "give the checkpoint that the model was trained from"
    if sizes[0] != sizes[1]:
        raise ValueError(f"--reference must have the vocabulary of --model: {reference} has {sizes[1]} tokens, {model} "
            f"has {sizes[0]}; {remedy}")  # fmt: skip
    if (difference := tokenizer_difference(model, reference)) is not None:
        raise ValueError(f"--reference must have the tokenizer of --model: {difference}; {remedy}")


def _vocabulary_size(folder: str) -> int:
    from transformers import AutoConfig

    folder = base_of(folder) if is_adapter(folder) else folder
    require_one_model(folder)
    require_tied_head(folder)
    file = Path(folder) / "config.json"
    read_json(file)  # transformers would look for a name on the hub
    with reading(file, "by transformers"):
        return int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
