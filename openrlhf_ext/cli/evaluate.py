"""``python -m openrlhf_ext.cli.evaluate``: accuracy of a checkpoint with plain transformers.

    python -m openrlhf_ext.cli.evaluate --model CHECKPOINT --data heldout.jsonl --reward reward.py --limit 200

Exit status: 0; 1 if a requirement (``--expect_accuracy``, ``--min_gain``) is not met; 2 if something given is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from openrlhf_ext.config.files import tokenizer_fault
from openrlhf_ext.rewards.errors import RewardFailureLimit, RewardImportError

_ALLOWED_ERRORS = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        before = json.loads(Path(arguments.compare).read_text()) if arguments.compare else None
        _require_checkpoint(arguments.model, arguments.apply_chat_template)
        result = _evaluate(arguments)
        if arguments.json:
            _write_json(Path(arguments.json), result.to_json())
    except (ValueError, OSError, RewardFailureLimit, RewardImportError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    print(_summary(result.to_json(), before))
    unmet = _unmet(result, before, arguments)
    for requirement in unmet:
        print(f"evaluate: {requirement}", file=sys.stderr)
    return 1 if unmet else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m openrlhf_ext.cli.evaluate", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder of a Hugging Face checkpoint with its tokenizer")
    add("--data", required=True, help="problem file, one JSON object per line")
    add("--reward", required=True, help="Python file with reward_func, or http(s) addresses of reward servers")
    add("--input_key", default="question", help="key of the prompt")
    add("--label_key", default="answer", help="key of the label")
    add("--input_template", help="format string around the prompt, such as 'Q: {} A: '")
    add("--apply_chat_template", action="store_true", help="apply the tokenizer's chat template to the prompt")
    add("--limit", type=_positive, help="problems taken from the start of the file (default: all)")
    add("--n_samples", type=_positive, default=4, help="completions per prompt")
    add("--temperature", type=float, default=1.0, help="sampling temperature; 0 takes the most likely token")
    add("--top_p", type=float, default=1.0, help="nucleus size; 1 = whole vocabulary")
    add("--max_new_tokens", type=_positive, default=64, help="longest completion, tokens")
    add("--batch_size", type=_positive, default=256, help="sequences generated together")
    add("--seed", type=int, default=0, help="of the sampling")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the weights")
    add("--num_workers", type=_positive, default=2, help="grading processes")
    add("--reward_timeout_s", type=float, default=30.0, help="deadline of one call of the reward function, seconds")
    add("--max_failures", type=int, default=10, help="gradings that may fail; such completions count as wrong")
    add("--json", metavar="OUT", help="write the result to this file")
    add("--compare", metavar="BEFORE.json", help="an earlier result on the same data, shown beside this one")
    add("--min_gain", type=float, help="with --compare: smallest gain of accuracy, as a fraction")
    add("--expect_accuracy", type=float, help=f"fail if the accuracy is more than {_ALLOWED_ERRORS:g} standard errors "
        "away from this fraction")  # fmt: skip
    add("--expect_stderr", type=float, default=0.0, help="standard error of --expect_accuracy itself")
    return parser


def _require_checkpoint(folder: str, chat: bool) -> None:
    """A name that is no folder would be looked for on the hub, for a minute without a network."""
    if not Path(folder).is_dir():
        raise ValueError(f"--model must be a folder with a Hugging Face checkpoint: {folder} is none")
    if (fault := tokenizer_fault(folder, chat=chat)) is not None:
        raise ValueError(f"--model: {folder} {fault}")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _evaluate(arguments: argparse.Namespace) -> Any:
    if arguments.min_gain is not None and arguments.compare is None:
        raise ValueError("--min_gain needs --compare")
    from transformers.utils import logging as transformers_logging

    from openrlhf_ext.tools.evaluate import EvaluationOptions, evaluate_checkpoint

    transformers_logging.disable_progress_bar()
    names = {option.name for option in fields(EvaluationOptions)}
    options = EvaluationOptions(**{name: value for name, value in vars(arguments).items() if name in names})
    return evaluate_checkpoint(arguments.model, arguments.data, arguments.reward, options)


def _summary(result: dict[str, Any], before: dict[str, Any] | None) -> str:
    lines = [f"model            {result['model']}", f"data             {result['dataset']}"]
    if before is not None:
        lines.append(f"accuracy before  {_accuracy(before)}")
    lines.append(f"accuracy         {_accuracy(result)}")
    passes = "  ".join(f"pass@{k} {100 * value:.1f} %" for k, value in result["pass_at_k"].items())
    lines += [
        f"                 {passes}  maj@{result['samples_per_prompt']} {100 * result['majority_at_n']:.1f} %",
        f"completions      {result['response_length_mean']:.1f} tokens, "
        f"{100 * result['truncated_rate']:.1f} % truncated",
        f"time             {result['seconds']:.1f} s",
    ]
    if result["skipped_overlong"]:
        lines.append(f"left out         {result['skipped_overlong']} prompts that are too long for the model")
    if result["reward_failures"]:
        lines.append(f"not graded       {result['reward_failures']} completions (counted as wrong)")
    return "\n".join([*lines, *_sample_lines(result, before)])


def _accuracy(result: dict[str, Any]) -> str:
    error = result["standard_error"]
    margin = "" if error is None else f" +- {100 * error:.1f}"
    counts = f"{result['prompts']} prompts x {result['samples_per_prompt']} samples"
    return f"{100 * result['accuracy']:.1f} %{margin} (standard error; {counts})"


def _sample_lines(result: dict[str, Any], before: dict[str, Any] | None) -> list[str]:
    earlier = {sample["prompt"]: sample for sample in (before or {}).get("sample_answers", [])}
    lines = []
    for sample in result["sample_answers"]:
        lines += ["", f"question  {sample['prompt']}"]
        if sample["prompt"] in earlier:
            lines.append(f"  before  {_graded(earlier[sample['prompt']])}")
        lines.append(f"  answer  {_graded(sample)}")
    return lines


def _graded(sample: dict[str, Any]) -> str:
    return f"[{sample['score']:g}] {sample['completion']}"


def _unmet(result: Any, before: dict[str, Any] | None, arguments: argparse.Namespace) -> list[str]:
    from openrlhf_ext.tools.evaluate import difference_in_errors

    unmet = []
    if arguments.min_gain is not None and before is not None:
        gain = result.accuracy - before["accuracy"]
        if gain < arguments.min_gain:
            unmet.append(
                f"accuracy rose by {100 * gain:.1f} points, --min_gain asks for {100 * arguments.min_gain:.1f}"
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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main())
