"""``openrlhf-ext evaluate``: accuracy of a checkpoint, with plain transformers or vLLM.

    openrlhf-ext evaluate --model CHECKPOINT --engine vllm --out RESULTS --n 64 --k 1 8 16 32 64 \\
        --max_new_tokens 4096 --benchmark aime24=aime24.jsonl amc23=amc23.jsonl
    openrlhf-ext evaluate --model CHECKPOINT --data heldout.jsonl --reward reward.py --limit 200
    openrlhf-ext evaluate --completions saved.jsonl --benchmark gsm8k=gsm8k.jsonl

docs/evaluation.md says more. Exit status: 0; 1 if nothing could be graded or a requirement (``--expect_accuracy``,
``--min_gain``) is not met; 2 if something given is wrong, or the evaluation could not go on.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from openrlhf_ext.cli.main import CommandParser, at_least, positive, silence_libraries
from openrlhf_ext.inputs import reading
from openrlhf_ext.locks import FolderLock, LockError
from openrlhf_ext.outputs import write_text
from openrlhf_ext.rewards.grading import RewardFailureLimit, RewardImportError
from openrlhf_ext.rollout.response import RolloutError
from openrlhf_ext.tools.evaluate.problems import Store
from openrlhf_ext.tools.evaluate.protocols import PROTOCOLS, listed
from openrlhf_ext.tools.evaluate.request import Request
from openrlhf_ext.tools.evaluate.result import EvaluationResult, examples, notes, tables

_ALLOWED_ERRORS = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    silence_libraries()
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    for said in ("tools.evaluate", "rewards.pool"):  # progress, and how a reward function is called
        logging.getLogger(f"openrlhf_ext.{said}").setLevel(logging.INFO)
    arguments = _parser().parse_args(argv)
    request = Request(arguments)
    try:
        if faults := list(request.faults()):
            raise ValueError("\n".join(faults))
        return _finish(request, _results(request))
    except (ValueError, OSError, RewardFailureLimit, RewardImportError, RolloutError) as error:
        # what grades for a run, too, names the run's options
        text = str(error).replace("--reward.max_failures", "--max_failures").replace("--reward.remote_url", "--reward")
        for line in text.splitlines():
            _print(f"evaluate: {line}", sys.stderr)
        return 2


def _finish(request: Request, results: Sequence[EvaluationResult]) -> int:
    if ungraded := [result for result in results if result.nothing_graded]:
        for result in ungraded:
            # a grader that failed may work again when the same command is given once more
            if (store := request.store_path(result.benchmark)) is not None:
                store.unlink()
            _print(f"evaluate: {result.benchmark}: nothing was graded: {result.grading_error}", sys.stderr)
        return 1
    before = request.before
    said = [request.protocol_note] if request.protocol_note else []
    said += [note for result in results for note in notes(result)]
    text = "\n".join([tables(results, before), *(f"\n{note}" for note in said)])
    written = _write_results(request, results, text)
    seconds = sum(result.seconds for result in results)
    shown = [*(examples(result, before) for result in results), text]
    _print("\n\n".join([*shown, f"{seconds:.1f} s; results in {' and '.join(written)}"]))
    unmet = _unmet(results[0], before, request.arguments)
    for requirement in unmet:
        _print(f"evaluate: {requirement}", sys.stderr)
    return 1 if unmet else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("evaluate", __doc__.split("\n")[0])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"protocols:\n{listed()}"
    add = parser.add_argument
    add("--model", help="folder of a Hugging Face checkpoint with its tokenizer")
    add("--benchmark", nargs="+", action="extend", default=[], metavar="NAME=FILE", help="a benchmark's file as it was "
        "published: gsm8k, math, math500, aime24, aime25, amc23")  # fmt: skip
    add("--data", help="instead of a benchmark: problem file of your own, in a format of training; needs --reward")
    add("--completions", metavar="FILE", help="grade these completions instead of sampling: lines "
        '{"problem": 0, "completions": ["text", ...]}, or a file of --out')  # fmt: skip
    add("--reward", help="Python file with reward_func, or http(s) addresses of reward servers (default for "
        "benchmarks: mathematical equality)")  # fmt: skip
    add("--out", metavar="FOLDER", help="keep every problem's graded completions in FOLDER/NAME.jsonl, results.json "
        "and tables.md there; the same command goes on where it was killed (default: a folder in runs/evaluation named "
        "after model, data and settings; with --json none)")  # fmt: skip
    add("--engine", default="transformers", choices=["transformers", "vllm"], help="what samples")
    add("--protocol", choices=sorted(PROTOCOLS), help="a paper's evaluation (below): template, system prompt, chat "
        "template, n, temperature, top_p, longest completion, and where the answer stands; an option given besides it "
        "wins, which the results say")  # fmt: skip
    add("--input_key", default="question", help="key of the prompt in --data")
    add("--label_key", default="answer", help="key of the label in --data")
    add("--input_template", help="format string around the prompt, such as 'Q: {} A: ' (default for benchmarks: asks "
        "for steps and \\boxed{}, but with a protocol's system prompt)")  # fmt: skip
    add("--system_prompt", help="system message, or the name of a protocol that has one: conflict; without a chat "
        "template it stands in front of the prompt. A protocol's questions stand alone")  # fmt: skip
    add("--apply_chat_template", action=argparse.BooleanOptionalAction,
        help="apply the tokenizer's chat template to the prompt")  # fmt: skip
    add("--limit", type=positive, help="problems taken from the start of each file (default: all)")
    add("--n", "--n_samples", dest="n_samples", type=positive, help="completions per prompt (default: 4)")
    add("--k", type=positive, nargs="+", metavar="K", help="sizes of pass@k and maj@k (default: powers of two up to n)")
    add("--greedy", action="store_true", help="sample one more completion of each problem, of the most likely tokens, "
        "and report its accuracy apart")  # fmt: skip
    add("--short_tokens", type=positive, metavar="N", help="report the share of completions of at most N tokens, "
        "their accuracy, and that of the longer ones")  # fmt: skip
    add("--entropy", action="store_true", help="report the mean entropy, in nats, of the tokens of right and of wrong "
        "completions (--engine transformers, temperature above 0)")  # fmt: skip
    add("--reference", metavar="FOLDER", help="--entropy, and the mean KL divergence of the model from this checkpoint "
        "at the tokens of the completions, in nats; exact, over the whole vocabulary")  # fmt: skip
    add("--temperature", type=float, help="sampling temperature; 0 takes the most likely token (default: 1)")
    add("--top_p", type=float, help="nucleus size; 1 = whole vocabulary (default: 1)")
    add("--max_new_tokens", type=positive, help="longest completion, tokens (default: 64; with --benchmark 1024)")
    add("--batch_size", type=positive, default=256, help="sequences generated together")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ... (--engine vllm: cpu or cuda)")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the weights")
    add("--tensor_parallel_size", type=positive, default=1, help="--engine vllm: workers that share the model")
    add("--gpu_memory_utilization", type=float, default=0.9, help="--engine vllm: share of each GPU's memory")
    add("--kv_cache_mib", type=positive, default=512, help="--engine vllm on CPU: KV cache per worker, MiB")
    add("--engine_timeout_s", type=float, default=1800.0, help="--engine vllm: deadline for loading the model, and for "
        "the next completion to finish, seconds")  # fmt: skip
    add("--num_workers", type=positive, default=2, help="grading processes")
    add("--reward_timeout_s", type=float, default=30.0, help="deadline of one call of the reward function, seconds")
    add("--max_failures", type=at_least(0), help="gradings that may fail; such completions count as wrong "
        "(default: 10 with --reward, any number without)")  # fmt: skip
    add("--json", metavar="OUT", help="write the result, with the options, to this file")
    add("--compare", metavar="BEFORE.json", help="an earlier result on the same data, shown beside this one: a file of "
        "--json, or results.json")  # fmt: skip
    add("--min_gain", type=float, help="with --compare: smallest gain of accuracy, as a fraction")
    add("--expect_accuracy", type=float, help=f"fail if the accuracy is more than {_ALLOWED_ERRORS:g} standard errors "
        "away from this fraction")  # fmt: skip
    add("--expect_stderr", type=float, default=0.0, help="standard error of --expect_accuracy itself")
    return parser


def _results(request: Request) -> list[Any]:
    from openrlhf_ext.tools.evaluate.checkpoint import GradingSettings, evaluate, grade_saved
    from openrlhf_ext.tools.evaluate.sampling import SamplingSettings

    given = request.arguments
    max_failures = 10 if given.max_failures is None and given.reward else given.max_failures
    grading = GradingSettings(
        num_workers=given.num_workers, reward_timeout_s=given.reward_timeout_s, max_failures=max_failures
    )
    tasks = request.tasks
    with ExitStack() as opened:
        if request.out:
            opened.enter_context(closing(_locked(request.out)))
        paths = [request.store_path(task.name) for task in tasks]
        settings = request.settings if request.out else [{}] * len(tasks)
        given = opened.enter_context(_whole(given))
        stores = [opened.enter_context(Store(*pair)) for pair in zip(paths, settings, strict=True)]
        if given.completions:
            ks = request.ks(len(request.completions[0]))
            return [grade_saved(tasks[0], stores[0], request.completions, grading, ks, _chat_tokenizer(given))]
        sampling = SamplingSettings(
            n_samples=request.samples, temperature=given.temperature, top_p=given.top_p,
            max_new_tokens=given.max_new_tokens, batch_size=given.batch_size, seed=given.seed, greedy=given.greedy,
        )  # fmt: skip
        open_sampler = partial(_open_vllm if given.engine == "vllm" else _open_transformers, given, sampling)
        ks = request.ks(request.samples)
        results = evaluate(tasks, stores, given.model, sampling, grading, ks, open_sampler, given.short_tokens)
        return [replace(result, model=request.arguments.model) for result in results]


@contextmanager
def _whole(given: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The arguments with whole checkpoints in the places of LoRA adapters, in a folder that is there in the body."""
    from openrlhf_ext.checkpoints import CheckpointError
    from openrlhf_ext.megatron.model.adapter import is_adapter
    from openrlhf_ext.tools.merge import merge

    named = {name: getattr(given, name) for name in ("model", "reference")}
    adapters = {name: folder for name, folder in named.items() if folder is not None and is_adapter(folder)}
    with tempfile.TemporaryDirectory(prefix="merged-") as folder:
        for name, adapter in adapters.items():
            _print(f"evaluate: --{name} is an adapter; its base, with it in the weights, goes to {folder}", sys.stderr)
            try:
                merge(adapter, Path(folder) / name)
            except CheckpointError as error:
                raise ValueError(f"{error}; TMPDIR names another place") from error
        yield argparse.Namespace(**vars(given) | {name: str(Path(folder) / name) for name in adapters})


def _locked(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder, take_over=True, remedy="give another --out")
    except LockError as error:
        raise ValueError(f"--out: {folder} {error}, or give another --out") from error


def _chat_tokenizer(arguments: argparse.Namespace) -> Any:
    if not arguments.apply_chat_template:
        return None
    from transformers import AutoTokenizer

    with reading(arguments.model, "as a tokenizer"):
        return AutoTokenizer.from_pretrained(arguments.model)


def _open_transformers(
    arguments: argparse.Namespace, sampling: Any, tokenizer: Any, prompts: Sequence[str]
) -> AbstractAsyncContextManager[Any]:
    from transformers.utils import logging as transformers_logging

    from openrlhf_ext.tools.evaluate.checkpoint import open_transformers

    transformers_logging.disable_progress_bar()
    return open_transformers(
        arguments.model, tokenizer, sampling, arguments.device, arguments.dtype, entropy=arguments.entropy,
        reference=arguments.reference,
    )  # fmt: skip


@asynccontextmanager
async def _open_vllm(
    arguments: argparse.Namespace, sampling: Any, tokenizer: Any, prompts: Sequence[str]
) -> AsyncIterator[Any]:
    from openrlhf_ext import patches

    patches.apply()
    from openrlhf_ext.options.sections import Vllm
    from openrlhf_ext.rollout.launch import engine_env, offline_engine_args

    use_gpu = arguments.device == "cuda"
    # on this terminal stand our results; vLLM warns of a CPU, and of settings that are ours
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(engine_env(use_gpu=use_gpu, model_path=arguments.model))
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(arguments.engine_timeout_s) + 1)
    from openrlhf_ext.rollout.in_process import OfflineEngine  # imports vLLM
    from openrlhf_ext.tools.evaluate.sampling import EngineSampler

    longest = max(map(len, tokenizer(list(prompts), add_special_tokens=False)["input_ids"]))
    options = Vllm(tensor_parallel_size=arguments.tensor_parallel_size, kv_cache_mib=arguments.kv_cache_mib)
    share = arguments.gpu_memory_utilization if use_gpu else None
    length = longest + sampling.max_new_tokens
    engine_args = offline_engine_args(arguments.model, arguments.dtype, length, options, share)
    engine = await OfflineEngine.start(engine_args, arguments.engine_timeout_s)
    try:
        yield EngineSampler(engine, tokenizer, arguments.model, sampling)
    finally:
        engine.close()


def _write_results(request: Request, results: Sequence[EvaluationResult], text: str) -> list[str]:
    arguments, shown = request.arguments, [asdict(result) for result in results]
    written = []
    if arguments.json:
        options = {"options": vars(arguments) | {"n_samples": shown[0]["samples_per_prompt"]}}
        kept = shown[0] if len(shown) == 1 else {"results": shown}
        write_text(Path(arguments.json), json.dumps({**kept, **options}, indent=2) + "\n")
        written.append(arguments.json)
    if request.out:
        lasting = [{name: value for name, value in each.items() if name != "seconds"} for each in shown]
        write_text(request.out / "results.json", json.dumps(lasting, indent=2) + "\n")
        write_text(request.out / "tables.md", text + "\n")
        names = ", ".join(f"{task.name}.jsonl" for task in request.tasks)
        written.append(f"{request.out} (results.json, tables.md; every completion: {names})")
    return written


def _print(text: str, file: Any = None) -> None:
    """Print what the output's encoding can show: completions may hold anything."""
    stream = file or sys.stdout
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def _unmet(result: Any, before: dict[str, Any] | None, arguments: argparse.Namespace) -> list[str]:
    from openrlhf_ext.tools.evaluate.result import difference_in_errors

    unmet = []
    if arguments.min_gain is not None and before is not None:
        gain = result.accuracy - before["accuracy"]
        if gain < arguments.min_gain:
            unmet.append(
                f"accuracy changed by {100 * gain:+.1f} points, --min_gain asks for {100 * arguments.min_gain:.1f}"
            )
    if arguments.expect_accuracy is not None:
        own_error = result.standard_error or 0.0
        apart = difference_in_errors(result.accuracy, own_error, arguments.expect_accuracy, arguments.expect_stderr)
        if apart > _ALLOWED_ERRORS:
            unmet.append(
                f"accuracy {100 * result.accuracy:.1f} % is {apart:.1f} standard errors away from --expect_accuracy "
                f"{100 * arguments.expect_accuracy:.1f} %; at most {_ALLOWED_ERRORS:g} are sampling error"
            )
    return unmet


if __name__ == "__main__":
    sys.exit(main())
