"""``openrlhf-ext evaluate``: accuracy of a checkpoint, with plain transformers or vLLM.

    openrlhf-ext evaluate --model CHECKPOINT --engine vllm --out RESULTS --n 64 --k 1 8 16 32 64 \\
        --max_new_tokens 4096 --benchmark aime24=aime24.jsonl amc23=amc23.jsonl
    openrlhf-ext evaluate --model CHECKPOINT --data heldout.jsonl --reward reward.py --limit 200
    openrlhf-ext evaluate --completions saved.jsonl --benchmark gsm8k=gsm8k.jsonl

docs/evaluation.md says more. Exit status: 0; 1 if nothing could be graded or a requirement
(``--expect_accuracy``, ``--min_gain``) is not met; 2 if the input is wrong, or the evaluation could
not continue.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from openrlhf_ext.cli.main import show, silence_libraries
from openrlhf_ext.inputs import reading
from openrlhf_ext.locks import FolderLock, LockError
from openrlhf_ext.options import required
from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.outputs import write_text
from openrlhf_ext.redaction import RedactingFormatter
from openrlhf_ext.rewards.grading import RewardFailureLimit, RewardImportError
from openrlhf_ext.rollout.response import RolloutError
from openrlhf_ext.tools.evaluate.problems import Store
from openrlhf_ext.tools.evaluate.request import Request, load_request
from openrlhf_ext.tools.evaluate.result import (
    EvaluationResult,
    difference_in_errors,
    examples,
    notes,
    tables,
)

_ALLOWED_ERRORS = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    silence_libraries()
    logging.basicConfig(stream=sys.stderr)
    logging.root.handlers[0].setFormatter(RedactingFormatter())
    for said in ("tools.evaluate", "rewards.pool"):  # progress, and how a reward function is called
        logging.getLogger(f"openrlhf_ext.{said}").setLevel(logging.INFO)
    try:
        request = load_request(sys.argv[1:] if argv is None else argv)
        return _finish(request, _results(request))
    except (ValueError, OSError, RewardFailureLimit, RewardImportError, RolloutError) as error:
        # what grades for a run, too, names the run's options
        text = (
            str(error)
            .replace("--reward.max_failures", "--max_failures")
            .replace("--reward.remote_url", "--reward")
        )
        for line in text.splitlines():
            show(f"evaluate: {line}", sys.stderr)
        return 2


def _finish(request: Request, results: Sequence[EvaluationResult]) -> int:
    if ungraded := [result for result in results if result.nothing_graded]:
        for result in ungraded:
            # a grader that failed may work again when the same command is given once more
            if (store := request.store_path(result.benchmark)) is not None:
                store.unlink()
            show(
                f"evaluate: {result.benchmark}: nothing was graded: {result.grading_error}",
                sys.stderr,
            )
        return 1
    before = request.before
    said = [request.protocol_note] if request.protocol_note else []
    said += [note for result in results for note in notes(result)]
    text = "\n".join([tables(results, before), *(f"\n{note}" for note in said)])
    written = _write_results(request, results, text)
    seconds = sum(result.seconds for result in results)
    shown = [*(examples(result, before) for result in results), text]
    show("\n\n".join([*shown, f"{seconds:.1f} s; results in {' and '.join(written)}"]))
    unmet = _unmet(results[0], before, request.options)
    for requirement in unmet:
        show(f"evaluate: {requirement}", sys.stderr)
    return 1 if unmet else 0


def _results(request: Request) -> list[EvaluationResult]:
    from openrlhf_ext.tools.evaluate.checkpoint import evaluate, grade_saved, open_transformers

    tasks = request.tasks
    with ExitStack() as opened:
        if request.out:
            opened.enter_context(closing(_locked(request.out)))
        paths = [request.store_path(task.name) for task in tasks]
        settings = request.settings if request.out else [{}] * len(tasks)
        options = opened.enter_context(_whole(request.options))
        stores = [opened.enter_context(Store(*pair)) for pair in zip(paths, settings, strict=True)]
        if options.completions:
            ks = request.ks(len(request.completions[0]))
            return [
                grade_saved(
                    tasks[0], stores[0], request.completions, options, ks, _chat_tokenizer(options)
                )
            ]
        open_sampler = _open_vllm if options.engine == "vllm" else open_transformers
        results = evaluate(tasks, stores, options, request.ks(options.n_samples), open_sampler)
        return [replace(result, model=request.options.model) for result in results]


@contextmanager
def _whole(options: Evaluate) -> Iterator[Evaluate]:
    """The options with a whole checkpoint in the place of a LoRA adapter, in a folder that is there
    in the body."""
    from openrlhf_ext.checkpoints import CheckpointError
    from openrlhf_ext.megatron.model.adapter import is_adapter
    from openrlhf_ext.tools.merge import merge

    if options.model is None or not is_adapter(options.model):
        yield options
        return
    with tempfile.TemporaryDirectory(prefix="merged-") as folder:
        show(
            "evaluate: --model is an adapter; its base with the adapter merged is written to "
            f"{folder}",
            sys.stderr,
        )
        try:
            merge(options.model, Path(folder) / "model")
        except CheckpointError as error:
            raise ValueError(f"{error}; set TMPDIR to another folder") from error
        yield options.model_copy(update={"model": str(Path(folder) / "model")})


def _locked(folder: Path) -> FolderLock:
    try:
        return FolderLock(folder, take_over=True, remedy="use another --out")
    except LockError as error:
        raise ValueError(f"--out: {folder} {error}, or use another --out") from error


def _chat_tokenizer(options: Evaluate) -> Any:
    if not options.apply_chat_template:
        return None
    from transformers import AutoTokenizer

    with reading(model := required(options.model, "model"), "as a tokenizer"):
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


@asynccontextmanager
async def _open_vllm(
    options: Evaluate, tokenizer: Any, prompts: Sequence[str]
) -> AsyncIterator[Any]:
    from openrlhf_ext import patches

    patches.apply()
    from openrlhf_ext.config.model_rules import local_shape
    from openrlhf_ext.megatron.model.positions import engine_overrides
    from openrlhf_ext.options.sections import Vllm
    from openrlhf_ext.rollout.launch import engine_env, offline_engine_args

    use_gpu, model = options.device == "cuda", required(options.model, "model")
    # on this terminal stand our results; vLLM warns of a CPU, and of settings that are ours
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(engine_env(use_gpu=use_gpu, model_path=model))
    os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(options.engine_timeout_s) + 1)
    from openrlhf_ext.rollout.in_process import OfflineEngine  # imports vLLM
    from openrlhf_ext.tools.evaluate.sampling import EngineSampler

    longest = max(map(len, tokenizer(list(prompts), add_special_tokens=False)["input_ids"]))
    section = Vllm(
        tensor_parallel_size=options.tensor_parallel_size, kv_cache_mib=options.kv_cache_mib
    )
    share = options.gpu_memory_utilization if use_gpu else None
    shape, _ = local_shape("model", model)  # None: of a model that only vLLM knows
    overrides = {} if shape is None else engine_overrides(shape.rotary)
    keeps_states = shape is not None and shape.keeps_states
    longest += options.max_new_tokens
    engine_args = offline_engine_args(
        model, options.dtype, longest, section, share, overrides, keeps_states
    )
    engine = await OfflineEngine.start(engine_args, options.engine_timeout_s)
    try:
        yield EngineSampler(engine, tokenizer, options)
    finally:
        engine.close()


def _write_results(request: Request, results: Sequence[EvaluationResult], text: str) -> list[str]:
    file, shown = request.options.json_file, [asdict(result) for result in results]
    written = []
    if file:
        options = request.options.model_dump(exclude={"json_file"})
        options |= {"json": file, "n_samples": shown[0]["samples_per_prompt"]}
        kept = shown[0] if len(shown) == 1 else {"results": shown}
        write_text(Path(file), json.dumps({**kept, "options": options}, indent=2) + "\n")
        written.append(file)
    if request.out:
        lasting = [
            {name: value for name, value in each.items() if name != "seconds"} for each in shown
        ]
        write_text(request.out / "results.json", json.dumps(lasting, indent=2) + "\n")
        write_text(request.out / "tables.md", text + "\n")
        names = ", ".join(f"{task.name}.jsonl" for task in request.tasks)
        written.append(f"{request.out} (results.json, tables.md; every completion: {names})")
    return written


def _unmet(result: EvaluationResult, before: dict[str, Any] | None, options: Evaluate) -> list[str]:
    unmet = []
    if options.min_gain is not None and before is not None:
        gain = result.accuracy - before["accuracy"]
        if gain < options.min_gain:
            unmet.append(
                f"accuracy changed by {100 * gain:+.1f} points, but --min_gain requires "
                f"{100 * options.min_gain:.1f}"
            )
    if options.expect_accuracy is not None:
        own_error = result.standard_error or 0.0
        apart = difference_in_errors(
            result.accuracy, own_error, options.expect_accuracy, options.expect_stderr
        )
        if apart > _ALLOWED_ERRORS:
            unmet.append(
                f"accuracy {100 * result.accuracy:.1f} % is {apart:.1f} standard errors away from "
                f"--expect_accuracy {100 * options.expect_accuracy:.1f} %; at most "
                f"{_ALLOWED_ERRORS:g} count as sampling error"
            )
    return unmet


if __name__ == "__main__":
    sys.exit(main())
