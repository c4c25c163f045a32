"""The options of ``openrlhf-ext evaluate``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from openrlhf_ext.options import Float, Int, Violation, option
from openrlhf_ext.options.table import Configuration

# an option has its default, its meaning and its bounds, a violation its options and its words, as
# in a table


class Evaluate(Configuration):
    """What is evaluated, how it is sampled and graded, and what is reported."""

    usage: ClassVar[str] = """\
usage: openrlhf-ext evaluate --model FOLDER --benchmark NAME=FILE ... [--out FOLDER] [--config FILE.yaml ...] ...

Accuracy of a checkpoint, with plain transformers or vLLM (docs/evaluation.md). --no-NAME switches a flag off.
"""
    abbreviates = True

    model: str | None = option(None, "folder of a Hugging Face checkpoint with its tokenizer")
    benchmark: tuple[str, ...] = option(
        (),
        "NAME=FILE ..., benchmark files as published: gsm8k, math, math500, aime24, aime25, amc23",
        repeats=True,
    )
    data: str | None = option(
        None,
        "instead of a benchmark: your own problem file, in a training data format; needs --reward",
    )
    completions: str | None = option(
        None,
        'grade the completions of this file instead of sampling: lines {"problem": 0, '
        '"completions": ["text", ...]}, or a file that --out wrote',
    )
    reward: str | None = option(
        None,
        "Python file with reward_func, or http(s) addresses of reward servers",
        default_text="for benchmarks: mathematical equality",
    )
    out: str | None = option(
        None,
        "write every problem's graded completions to FOLDER/NAME.jsonl, with results.json and "
        "tables.md; the same command resumes after it was killed",
        default_text="a folder in runs/evaluation named after model, data and settings; none with --json",
    )
    engine: Literal["transformers", "vllm"] = option("transformers", "program that samples")
    protocol: Literal["conflict", "entropy", "qwen_math"] | None = option(
        None,
        "a paper's evaluation (below): template, system prompt, chat template, n, temperature, "
        "top_p, longest completion, and where to find the answer; an option that is set overrides "
        "the protocol's, and the results say so",
    )
    input_key: str = option("question", "key of the prompt in --data")
    label_key: str = option("answer", "key of the label in --data")
    input_template: str | None = option(
        None,
        "format string around the prompt, such as 'Q: {} A: '",
        default_text="for benchmarks: asks for steps and \\boxed{}, except with a protocol's system prompt",
    )
    system_prompt: str | None = option(
        None,
        "system message, or the name of a protocol that has one: conflict; without a chat "
        "template it precedes the prompt. A protocol's message goes with the bare question",
    )
    apply_chat_template: bool = option(False, "apply the tokenizer's chat template to the prompt")
    limit: Int | None = option(
        None, "problems taken from the start of each file", ge=1, default_text="all"
    )
    n_samples: Int = option(4, "completions per prompt", ge=1, also="n")
    k: tuple[Annotated[Int, Field(ge=1)], ...] | None = option(
        None, "sizes of pass@k and maj@k", default_text="powers of two up to n"
    )
    temperature: Float = option(1.0, "sampling temperature; 0 takes the most likely token", ge=0)
    top_p: Float = option(1.0, "nucleus sampling threshold; 1 = whole vocabulary", gt=0, le=1)
    max_new_tokens: Int = option(
        64, "longest completion, tokens", ge=1, default_text="64; with --benchmark 1024"
    )
    batch_size: Int = option(256, "sequences generated together", ge=1)
    seed: int = option(0, "seed of the sampling")
    device: str = option("cpu", "cpu, cuda, cuda:1, ... (--engine vllm: cpu or cuda)")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "data type of the weights")
    tensor_parallel_size: Int = option(1, "--engine vllm: workers that share the model", ge=1)
    gpu_memory_utilization: Float = option(
        0.9, "--engine vllm: share of each GPU's memory", gt=0, le=1
    )
    kv_cache_mib: Int = option(
        512, "--engine vllm on CPU: KV cache per worker, MiB", ge=1, le=2**20
    )
    engine_timeout_s: Float = option(
        1800.0,
        "--engine vllm: deadline for loading the model, and for the next completion to finish, "
        "seconds",
        gt=0,
    )
    num_workers: Int = option(2, "grading processes", ge=1, le=2**8)
    reward_timeout_s: Float = option(
        30.0, "deadline of one call of the reward function, seconds", gt=0
    )
    max_failures: Int | None = option(
        None,
        "gradings that may fail; such completions count as wrong",
        ge=0,
        default_text="10 with --reward, any number without",
    )
    json_file: str | None = option(
        None, "write the result, with the options, to this file", also="json"
    )
    compare: str | None = option(
        None,
        "an earlier result on the same data, shown beside this one: a file of --json, "
        "or results.json",
    )
    min_gain: Float | None = option(
        None, "with --compare: smallest gain in accuracy, as a fraction"
    )
    expect_accuracy: Float | None = option(
        None, "fail if the accuracy is more than 3 standard errors away from this fraction"
    )
    expect_stderr: Float = option(0.0, "standard error of --expect_accuracy itself")

    def violations(self) -> Iterator[Violation]:
        yield from self._source_violations()
        if self.min_gain is not None and self.compare is None:
            yield Violation(("min_gain", "compare"), "--min_gain needs --compare")
        for name in ("compare", "expect_accuracy"):
            if getattr(self, name) is not None and len(self.benchmark) > 1:
                yield Violation(
                    (name, "benchmark"),
                    f"--{name} is for one problem file: got {len(self.benchmark)} benchmarks",
                )
        if self.engine == "vllm" and self.device not in ("cpu", "cuda"):
            yield Violation(
                ("device", "engine"),
                "--device must be cpu or cuda with --engine vllm: got "
                f"{self.device}; CUDA_VISIBLE_DEVICES chooses the GPUs",
            )

    def _source_violations(self) -> Iterator[Violation]:
        if bool(self.benchmark) == bool(self.data):
            yield Violation(
                ("benchmark", "data"),
                "give either --benchmark NAME=FILE (one or several), or --data FILE with --reward",
            )
        if self.data and not self.reward:
            yield Violation(
                ("data", "reward"), "--data needs --reward, which decides what a correct answer is"
            )
        if self.completions and len(self.benchmark) > 1:
            yield Violation(
                ("completions", "benchmark"),
                f"--completions are for one benchmark: got {len(self.benchmark)}; grade them one "
                "after the other",
            )
        if self.model is None and not self.completions:
            yield Violation(
                ("model", "completions"),
                "give --model (a checkpoint to sample from), or --completions (saved ones)",
            )
        elif self.model is None and self.apply_chat_template:
            yield Violation(
                ("apply_chat_template", "completions", "model"),
                "--apply_chat_template with --completions needs --model, whose tokenizer has "
                "the template",
            )
