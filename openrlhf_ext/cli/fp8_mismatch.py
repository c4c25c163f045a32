"""``openrlhf-ext fp8_mismatch``: how far trainer and rollout engine disagree, by the precision of each.

    openrlhf-ext fp8_mismatch --model CHECKPOINT --rollouts FILE.jsonl --trainer_tp 2
    openrlhf-ext fp8_mismatch --model CHECKPOINT --rollouts FILE.jsonl --per_layer --figure OUT.png

FP8 is emulated in plain torch on any device; one sequence is one pack. Beside the model, fp32 copies of the decoder's
linear weights need memory. Exit status: 0; 2 if something given is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf_ext.cli.command import CommandParser, silence_libraries
from openrlhf_ext.config.files import tokenizer_fault

if TYPE_CHECKING:
    from openrlhf_ext.tools.fp8_mismatch import Mismatch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    silence_libraries()
    from openrlhf_ext.tools.fp8_mismatch import PRECISIONS, table, write_figure  # imports torch

    arguments = _parser(PRECISIONS).parse_args(argv)
    try:
        found = _measure(arguments)
        if arguments.json:
            Path(arguments.json).write_text(
                json.dumps({"settings": vars(arguments)} | found.to_json(), indent=1) + "\n"
            )
        if arguments.figure:
            write_figure(found, Path(arguments.figure), Path(arguments.model).name)
    except (ValueError, OSError) as error:
        print(f"fp8_mismatch: {error}", file=sys.stderr)
        return 2
    print(f"EMULATED, {found.tokens} tokens, trainer TP {arguments.trainer_tp}, engine TP {arguments.engine_tp}")
    if found.other_tiles:
        print("trainer and engine cut different 128x128 tiles of " + ", ".join(found.other_tiles))
    print(table(found))
    return 0


def _measure(arguments: argparse.Namespace) -> Mismatch:
    if not Path(arguments.model).is_dir():
        raise ValueError(f"--model must be a folder with a Hugging Face checkpoint: {arguments.model} is none")
    if (fault := tokenizer_fault(arguments.model, chat=False)) is not None:
        raise ValueError(f"--model: {arguments.model} {fault}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

    from openrlhf_ext.fp8.recipe import BF16Layers
    from openrlhf_ext.tools.fp8_mismatch import PLAIN, measure, read_completions

    def load(dtype: torch.dtype) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).to(arguments.device).eval()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    return measure(
        load, read_completions(Path(arguments.rollouts), tokenizer, arguments.limit),
        trainer=arguments.trainer, rollout=arguments.rollout, trainer_tp=arguments.trainer_tp,
        engine_tp=arguments.engine_tp, dtype=PLAIN[arguments.dtype], per_layer=arguments.per_layer,
        bf16_layers=BF16Layers(arguments.layers_in_bf16_start, arguments.layers_in_bf16_end),
    )  # fmt: skip


def _parser(precisions: Sequence[str]) -> argparse.ArgumentParser:
    parser = CommandParser("fp8_mismatch", __doc__.split("\n")[0])
    add = parser.add_argument
    engine = [name for name in precisions if name != "delayed"]  # no engine has it
    add("--model", required=True, help="folder of a Hugging Face checkpoint with its tokenizer")
    add("--rollouts", required=True, metavar="FILE.jsonl", help="one completion per line: prompt, token_ids")
    add("--trainer", nargs="+", choices=precisions, default=list(precisions), help="precisions of the trainer")
    add("--rollout", nargs="+", choices=engine, default=engine[1:], help="precisions of the engine")
    add("--trainer_tp", type=_positive, default=1, help="tensor-parallel size of the trainer, which cuts its tiles")
    add("--engine_tp", type=_positive, default=1, help="tensor-parallel size of the engine")
    add("--dtype", default="fp32", choices=["fp32", "bf16"], help="of all that is not in FP8")
    add(
        "--layers_in_bf16_start", type=_count, default=0, help="first decoder layers that are not in FP8, on both sides"
    )
    add("--layers_in_bf16_end", type=_count, default=0, help="last decoder layers that are not")
    add("--limit", type=_positive, help="completions taken from the start of the file (default: all)")
    add("--per_layer", action="store_true", help="also with only one decoder layer in FP8, for each")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--json", metavar="OUT", help="write the result to this file")
    add("--figure", metavar="OUT.png", help="draw the result into this file")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
