"""``openrlhf-ext convert --check PATH [--tp N --pp N ...]`` proves that the policy
loads and exports a checkpoint unchanged; ``openrlhf-ext convert --merge ADAPTER --to FOLDER`` merges
a LoRA adapter into its base model; ``openrlhf-ext convert --text_only CHECKPOINT --to FOLDER`` writes
the text model of a checkpoint of images and text.

--check loads the Hugging Face checkpoint into the Megatron policy in the given layout (one process
per rank, on this machine), exports it again and compares bit for bit with the files, then compares
log-probs with transformers. --merge and --text_only write a full checkpoint that transformers and
vLLM load like any other.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_ext.cli.main import CommandParser, at_least, positive, show, silence_libraries

if TYPE_CHECKING:
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.megatron.model.shape import ModelShape


def main(argv: list[str] | None = None) -> int:
    """0 if everything agrees; 1 if something differs or a rank failed; 2 if the arguments or the
    model do not fit."""
    silence_libraries()
    from openrlhf_ext.patches import apply

    apply()
    arguments = _parse(argv)
    return _check(arguments) if arguments.check is not None else _write(arguments)


def _write(arguments: argparse.Namespace) -> int:
    from openrlhf_ext.checkpoints import CheckpointError
    from openrlhf_ext.inputs import InputError
    from openrlhf_ext.tools.merge import merge
    from openrlhf_ext.tools.text_model import write_text_model

    try:
        target = Path(arguments.to)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(
                "--to must be a new or an empty folder, because nothing is overwritten: got "
                f"{target}, which {'is not empty' if target.is_dir() else 'is a file'}; give "
                "another, or remove it"
            )
        if arguments.merge is not None:
            sizes = merge(arguments.merge, arguments.to, arguments.base)
            lines = ["with the adapter merged"]
        else:
            sizes, lines = write_text_model(arguments.text_only, arguments.to)
    except (ValueError, OSError, CheckpointError) as error:
        show(error, file=sys.stderr)
        return 2
    written = f"{arguments.to}: {sum(sizes.values()) / 2**20:.1f} MiB in {len(sizes)} files"
    show(f"{written}, " + "\n".join(lines))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    from openrlhf_ext.config.files import has_weights
    from openrlhf_ext.megatron.families import UnknownModelType
    from openrlhf_ext.megatron.model.hf_files import HFCheckpoint, describe, unaccounted_tensors
    from openrlhf_ext.tools.plan.conversion_check import (
        LOGPROB_TOLERANCES,
        CheckSettings,
        check_conversion,
        nearest_family,
    )

    try:
        layout, shape = _cut(arguments)
        problems = unaccounted_tensors(HFCheckpoint(arguments.check), shape)
    except (ValueError, OSError) as error:
        show(error, file=sys.stderr)
        if isinstance(error, UnknownModelType) and has_weights(arguments.check):
            show(nearest_family(arguments.check), file=sys.stderr)
        return 2
    if problems:
        show(f"{arguments.check}: {describe(problems)}", file=sys.stderr)
        return 2
    tolerance = (
        LOGPROB_TOLERANCES[arguments.dtype] if arguments.tolerance is None else arguments.tolerance
    )
    settings = CheckSettings(
        arguments.check,
        layout,
        arguments.dtype,
        arguments.sequences,
        arguments.tokens,
        tolerance,
        arguments.timeout_s,
    )
    try:
        report = check_conversion(settings)
    except (ProcessExitedException, ProcessRaisedException, TimeoutError) as error:
        show(error, file=sys.stderr)
        if isinstance(error, ProcessExitedException) and error.signal_name == "SIGKILL":
            show(
                "a rank that is killed has usually run out of memory: try --dtype bf16",
                file=sys.stderr,
            )
        return 1
    show(_text(report, settings))
    return 0 if report.passed(tolerance) else 1


def _cut(arguments: argparse.Namespace) -> tuple[ParallelLayout, ModelShape]:
    """The layout that the flags say, and the model. Raises ValueError: they do not fit together."""
    from openrlhf_ext.config.model_rules import beyond_window, divisible
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.megatron.model.shape import read_model_shape
    from openrlhf_ext.options.sections import Megatron

    ranks = arguments.pp * math.lcm(
        arguments.tp * arguments.cp, arguments.ep * (arguments.etp or 1)
    )
    given = {
        option: getattr(arguments, flag.removeprefix("--"))
        for option, flag in _FLAGS.items()
        if option in Megatron.model_fields
    }
    cut = Megatron(**given)
    layout = ParallelLayout.of(cut, ranks)
    if wrong := [problem for _, problem in layout.problems(_FLAGS.__getitem__)]:
        raise ValueError("; ".join(wrong))
    shape = read_model_shape(arguments.check)
    faults = [*divisible("--check", shape, _FLAGS.__getitem__, cut)]
    faults += beyond_window("--check", shape, "--tokens", arguments.tokens)
    original = shape.rotary.get("original_max_position_embeddings", arguments.tokens)
    is_long = shape.rotary["rope_type"] == "longrope"
    if is_long and original < arguments.tokens <= 2 * original + 1:
        raise ValueError(
            f"--tokens must be at most {original} or above {2 * original + 1} for longrope: "
            "sequences have between half of --tokens and all of them, and transformers chooses the "
            f"factors for each sequence: got {arguments.tokens}"
        )
    if faults:
        raise ValueError("; ".join(fault.message for fault in faults))
    return layout, shape


_FLAGS = {
    "world_size": "the ranks", "tensor_parallel_size": "--tp", "pipeline_parallel_size": "--pp",
    "context_parallel_size": "--cp", "sequence_parallel": "--sp", "virtual_pipeline_size": "--vp",
    "decoder_first_pipeline_num_layers": "--first_layers", "decoder_last_pipeline_num_layers": "--last_layers",
    "sequence_parallel_enable": "--sp", "expert_parallel_size": "--ep", "expert_tensor_parallel_size": "--etp",
}  # fmt: skip


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser("convert", __doc__.split("\n\n")[1])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", metavar="PATH", help="folder of the Hugging Face checkpoint")
    what.add_argument(
        "--merge",
        metavar="ADAPTER",
        help="folder of a LoRA adapter (ckpt.output_dir of a run with ds.lora.rank, or PEFT's) to "
        "merge into its base model",
    )
    what.add_argument(
        "--text_only",
        metavar="CHECKPOINT",
        help="folder of a published checkpoint of Qwen3.5 or Qwen3.6, to write its text model",
    )
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        help="--merge, --text_only: new or empty folder of the checkpoint that is written",
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        help="--merge: base model (default: the one that the adapter names)",
    )
    _add_layout(parser)
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="data type of both models (default fp32)",
    )
    parser.add_argument(
        "--sequences",
        type=positive,
        default=4,
        help="random sequences for the log-probs (default 4)",
    )
    parser.add_argument(
        "--tokens",
        type=at_least(2),
        default=64,
        help="length of the longest sequence, tokens (default 64)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=None,
        help="mean log-prob difference, nats (default fp32 1e-4, bf16 0.1)",
    )
    parser.add_argument(
        "--timeout_s", type=float, default=1800.0, help="longest time of the check (default 1800 s)"
    )
    arguments = parser.parse_args(argv)
    if (arguments.check is None) != (arguments.to is not None):
        parser.error("--to FOLDER belongs to --merge ADAPTER or --text_only CHECKPOINT")
    if arguments.base is not None and arguments.merge is None:
        parser.error("--base FOLDER belongs to --merge ADAPTER")
    return arguments


def _add_layout(parser: argparse.ArgumentParser) -> None:
    """Add the options of the layout that --check builds the model in."""
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--pp", type=positive, default=1, help="pipeline stages (default 1)")
    parser.add_argument("--cp", type=positive, default=1, help="context-parallel ranks (default 1)")
    parser.add_argument(
        "--ep", type=positive, default=1, help="ranks that experts are distributed over (default 1)"
    )
    parser.add_argument(
        "--etp",
        type=positive,
        help="ranks that each expert is split over (default: 1 with --ep, else --tp)",
    )
    parser.add_argument(
        "--vp", type=positive, default=1, help="model chunks per pipeline stage (default 1)"
    )
    for end in ("first", "last"):
        parser.add_argument(
            f"--{end}_layers",
            type=positive,
            help=f"layers of the {end} stage (default: as many as the others)",
        )
    parser.add_argument("--sp", action="store_true", help="sequence parallelism")


def _text(report, settings) -> str:
    shown = {"different": report.different, "not exported": report.missing}
    lists = [f"  {what}: {', '.join(names)}" for what, names in shown.items() if names]
    bits = "differ from the files" if lists else f"bit-identical to the files (as {settings.dtype})"
    gap = report.mean_logprob_difference
    within = "within" if gap <= settings.tolerance else "ABOVE"
    lines = [
        f"{report.tensors} tensors, {report.parameters:,} parameters exported: {bits}",
        *lists,
        f"log-probs against transformers: mean difference {gap:.2e} nats, {within} the tolerance "
        f"{settings.tolerance:g}; largest {report.max_logprob_difference:.2e}",
        "seconds: "
        + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in report.seconds.items()),
        "the checkpoint is loaded and exported unchanged"
        if report.passed(settings.tolerance)
        else "CHECK FAILED",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
