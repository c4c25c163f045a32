"""The record of what ran on a GPU, from the JSON of ``tests/gpu/run.py`` and of the FP8 study, and
text made from it.

    python benchmarks/gpu.py --output benchmarks/results/gpu_h200.json --run first=FOLDER "commit
    abc" --run ...

A FOLDER has the files that ``--output`` of ``tests/gpu/run.sh`` wrote and, in ``study/``, that of
``examples/scripts/fp8_study.sh``; the words beside it say which code ran. Kept are hardware,
versions, settings, and of every check its status, its seconds and what it measured, without lists
of log-probs and without repeats of timings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.harness import markdown_table

NAME = "gpu_h200.json"
GIB, MIB = 1 << 30, 1 << 20
RANK = {
    "model_type": "qwen2", "num_layers": 32, "hidden_size": 5120, "ffn_hidden_size": 3456, "num_heads": 5,
    "num_kv_heads": 1, "head_dim": 128, "vocab_size": 19008, "max_positions": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "rope_scaling_factor": None, "tied_embeddings": False, "qkv_bias": True, "qk_norm": False,
}  # fmt: skip
"""The model of ``tests/gpu/size.py``."""
_DROPPED = ("logprobs", "gpus_afterwards", "calls", "output", "bundle", "load_average")


_NOTES = (
    "TransformerEngine 2.11.0 was built on the machine and is not among the versions, which are "
    "read before it is on the path. In processes with its layers cuDNN was torch's libcudnn.so "
    "9.19 with the system's 9.14 for the rest (patches/transformer_engine_cudnn.py, written "
    "afterwards)."
)


# ---- the record


def made(runs: dict[str, tuple[Path, str]]) -> dict[str, Any]:
    """A record of runs: name -> folder and words on the code that ran."""
    found: dict[str, Any] = {
        "notes": _NOTES,
        "command": "bash tests/gpu/run.sh; bash examples/scripts/fp8_study.sh (docs/status.md)",
    }
    for name, (folder, commit) in runs.items():
        checks, run = {}, {"commit": commit}
        for file in sorted(folder.glob("*.json")):
            report = json.loads(file.read_text())
            for key in ("hardware", "versions"):
                if found.setdefault(key, report[key]) != report[key]:
                    raise ValueError(
                        f"{file} is of another machine or of other versions: {report[key]}"
                    )
            run["started"] = min(report["started"], run.get("started", report["started"]))
            # what a call did not run again is in the report of the one that ran it
            ran = {
                name: check
                for name, check in report["checks"].items()
                if check["status"] != "passed before"
            }
            checks |= {
                name.removeprefix("tests.gpu."): _outcome(check) for name, check in ran.items()
            }
        run["checks"] = checks
        if (study := folder / "study/study.json").exists():
            report = json.loads(study.read_text())
            cells = {name: _outcome(cell) for name, cell in report["cells"].items()}
            run["study"] = {"settings": _slim(report["settings"]), "cells": cells}
        found.setdefault("runs", {})[name] = run
    return found


def _outcome(check: dict[str, Any]) -> dict[str, Any]:
    kept = {
        key: _slim(check[key])
        for key in ("status", "seconds", "measured", "gpu")
        if check.get(key) is not None
    }
    lines = [
        line
        for line in str(check.get("error") or "").splitlines()
        if "Error: " in line or "not " in line
    ]
    return kept | ({"error": lines[-1][:300]} if lines else {})


def _slim(value: Any) -> Any:
    """Six digits of a number; of repeated timings the median."""
    if isinstance(value, dict):
        if "repeats" in value and "median" in value:
            return _slim(value["median"])
        return {key: _slim(part) for key, part in value.items() if key not in _DROPPED}
    if isinstance(value, list):
        return [_slim(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


_WALKS = {
    "forward ours": ("log-prob and entropy", 1, "forward full", "forward"),
    "token loss": ("token loss with gradients", 4, "full", "backward"),
    "logprob": ("log-prob with backward, logits twice", 4, "full", "backward"),
}
"""Of ``benchmarks/head_speed.py``: title, products, the way of all logits, whose extra memory."""


# ---- text


def _measured(check: str, run: str = "first") -> dict[str, Any]:
    return record.load(NAME)["runs"][run]["checks"][check]["measured"]


def _cells() -> dict[str, Any]:
    return record.load(NAME)["runs"]["second"]["study"]["cells"]


def machine() -> str:
    """The machine, its versions, and how many checks failed."""
    found = record.load(NAME)
    gpu, versions = found["hardware"]["gpus"][0], found["versions"]
    checks = [check for run in found["runs"].values() for check in run["checks"].values()]
    cells = list(found["runs"]["second"]["study"]["cells"].values())
    return record.wrapped(
        f"One {gpu['name']} ({gpu['power.limit']}, driver {gpu['driver_version']}), Python "
        f"{versions['python']}, torch {versions['torch']}, TransformerEngine 2.11.0, "
        f"megatron-core {versions['megatron-core']}, without vLLM, Ray and a network. In "
        f"{len(found['runs'])} calls {_count(checks, 'passed')} checks of `tests/gpu` passed "
        f"(some twice) and {_count(checks, 'failed')} failed; of {len(cells)} cells of the FP8 "
        f"study {_count(cells, 'passed')} passed and {_count(cells, 'failed')} failed, and for "
        f"{_count(cells, 'not run')} there was no time (`benchmarks/results/{NAME}`, with every "
        "error)."
    )


def _count(outcomes: list[dict[str, Any]], status: str) -> int:
    return sum(outcome["status"] == status for outcome in outcomes)


def layers() -> str:
    """What was compared with fp32, and with CPU's numbers."""
    parity, bf16 = _measured("policy:parity"), _measured("layers:parity", "second")["head size 128"]
    steps, packs = _measured("policy:three_steps"), _measured("layers:shapes", "second")
    optimizer, waits = _measured("layers:optimizer", "second"), _measured("waits:micro_batches")
    rope = _measured("layers:rope", "second")
    head = _measured("head:against_fp64")["error_of_largest_entry"]["torch.float32"]
    fp32 = max(family["logprob_nats"] for family in parity.values())
    gradient = max(family["worst_gradient"]["relative_error"] for family in parity.values())
    return record.wrapped(
        "\n".join(
            [
                f"- Plain layers in fp32 against transformers, {', '.join(parity)}: log-probs "
                f"within {fp32:.1e} nats, the worst gradient within {gradient:.1e}; three steps "
                f"against a CPU's: loss within {steps['loss_relative']:.0e}.",
                "- TransformerEngine's layers in bf16 against fp32: log-probs differ by "
                f"{_nats(bf16['none'])} nats on average, gradients by "
                f"{bf16['none']['gradient_relative']:.1%}; our plain layers in bf16 by "
                f"{_nats(bf16['plain in bf16'])} nats and "
                f"{bf16['plain in bf16']['gradient_relative']:.1%}. Every recompute mode gives "
                "the same log-probs.",
                f"- `megatron.rope_fusion`: {_nats(rope['on against fp32'])} nats from fp32, "
                f"{_nats(rope['off against fp32'])} without it.",
                f"- {optimizer['picked']['class']} is what Megatron picks; its step is torch's "
                f"AdamW's to {optimizer['picked']['weight_max_abs_difference']:.1e} of a change "
                f"of {optimizer['picked']['weight_max_abs_change']:.1e}.",
                f"- {packs['packs']} packs of unlike shapes, twice: the same bits, memory grew by "
                f"{packs['second_pass_grew_bytes'] / 1024:.0f} KiB the second time. The slowest "
                f"took {packs['first_seconds_max']:.1f} s the first time, half of them less than "
                f"{packs['first_seconds_median']:.3f} s.",
                f"- Head in Triton against float64: log-prob within {head['logprob']:.0e}, "
                f"entropy within {head['entropy']:.0e}; indices beyond int32; compute-sanitizer "
                "found nothing.",
                f"- Micro-batches of {len(waits['seconds'])} losses and variants of them never "
                "wait for the device (torch's sync debug mode at `error`).",
            ]
        )
    )


def _nats(found: dict[str, Any]) -> str:
    return f"{found['logprob_mean_abs_nats']:.4f}"


def head() -> str:
    """Ratios to the products, seconds and memory, of the fewest tokens that were measured."""
    header = [
        "tokens, shard of the vocabulary",
        "walk",
        "ms",
        "to its products",
        "extra memory, MiB",
        "all logits: ms",
        "MiB",
    ]
    rows = []
    cells = _measured("head:benchmark")["gpu"]
    sizes = {name: name.split() for name in cells if name.startswith("tokens")}
    fewest = min(int(words[1]) for words in sizes.values())
    for name, words in sizes.items():
        if int(words[1]) != fewest:
            continue
        found = cells[name]
        for walk, (title, products, full, memory) in _WALKS.items():
            extra, theirs = found[f"{memory}_extra_memory_mib"], found["seconds"].get(full)
            ratio = found[
                "ratio_to_1_product" if products == 1 else f"ratio_to_{products}_products"
            ]
            rows.append(
                [
                    f"{int(words[1]):,}, 1/{words[-1]}",
                    title,
                    f"{1e3 * found['seconds'][walk]:.1f}",
                    f"{ratio[walk]['median']:.2f} of {products}",
                    f"{extra[walk]:,.0f}",
                    "-" if theirs is None else f"{1e3 * theirs:.1f}",
                    "-" if theirs is None else f"{extra[full]:,.0f}",
                ]
            )
    return markdown_table(header, rows)


def rank() -> str:
    """MFU and memory of a rank of 32B, beside plan's."""
    found = _measured("size:memory_and_mfu", "second")
    header = [
        "recompute",
        "tokens",
        "forward and backward, s",
        "MFU",
        "log-probs, s",
        "peak, GiB",
        "plan, GiB",
    ]
    rows = []
    for mode, megatron in modes():
        for tokens in (16384, 32768):
            cell = found[f"{tokens} tokens, recompute {mode}"]
            rows.append(
                [
                    mode,
                    f"{tokens:,}",
                    f"{cell['forward_backward_seconds']:.3f}",
                    f"{cell['mfu']:.1%}",
                    f"{cell['logprobs_seconds']:.3f}",
                    f"{cell['peak_allocated_bytes'] / GIB:.1f}",
                    f"{planned(tokens, megatron, found['states']) / GIB:.1f}",
                ]
            )
    return markdown_table(header, rows)


def off() -> str:
    """How far plan's memory is from it."""
    found = _measured("size:memory_and_mfu", "second")
    states = sum(kind["bytes"] for kind in found["states"].values())
    exact = all(kind["bytes"] == kind["predicted_bytes"] for kind in found["states"].values())
    missing, shares = [], []
    for mode, megatron in modes():
        for tokens in (16384, 32768):
            peak = found[f"{tokens} tokens, recompute {mode}"]["peak_allocated_bytes"]
            lacks = peak - planned(tokens, megatron, found["states"])
            missing.append(lacks / GIB)
            shares.append(lacks / (peak - states))
    return record.wrapped(
        f"Weights, gradients and optimizer take {states / GIB:.2f} GiB, "
        f"{'to the byte what plan says' if exact else 'not what plan says'}. Plan's activations "
        f"and head are {min(missing):.1f} to {max(missing):.1f} GiB too few, {min(shares):.1%} "
        f"to {max(shares):.1%} of what is above the states: presumably what the backward pass "
        "works in. The tenth of the activations that plan adds as fragments, not in the table, "
        "is more."
    )


def modes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to recompute, as ``tests/gpu/policies.py`` names them, with their options."""
    yield "none", {}
    yield "core_attn", {"recompute": "selective"}
    yield "mlp", {"recompute": "selective", "recompute_modules": ("mlp",)}
    yield "core_attn and mlp", {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}
    yield "full, block of one layer", {"recompute": "full", "recompute_method": "block"}
    yield "full, uniform", {"recompute": "full"}


def planned(tokens: int, megatron: dict[str, Any], states: dict[str, Any]) -> int:
    """Bytes: states, activations, and the head's workspace, hidden states and gradient (a pack has
    15/16 responses)."""
    from openrlhf_ext.megatron.layout import ParallelLayout
    from openrlhf_ext.megatron.model.shape import ModelShape
    from openrlhf_ext.options.sections import Megatron
    from openrlhf_ext.planning.memory import Pass, activations

    work = Pass(tokens, megatron=Megatron(**megatron))
    kept = activations(ModelShape(**RANK), ParallelLayout(1), 0, work, 1)
    head = 256 * MIB + tokens * 15 // 16 * RANK["hidden_size"] * 4
    return sum(kind["predicted_bytes"] for kind in states.values()) + kept + head


def products() -> str:
    """FP8 products beside BF16's."""
    found = _cells()["products/blockwise"]["measured"]
    header = ["product", "TP", "inputs x outputs", "FP8, ms", "BF16, ms", "BF16 / FP8"]
    rows = [
        [
            of["name"],
            str(of["ranks"]),
            f"{of['inputs']} x {of['outputs']}",
            f"{1e3 * of['step_seconds']:.2f}",
            f"{1e3 * of['bf16_step_seconds']:.2f}",
            f"{of['ratio']:.2f}",
        ]
        for of in found["rows"]
    ]
    rows.append(["all together", "", "", "", "", f"**{found['ratio_of_sums']:.2f}**"])
    return markdown_table(header, rows)


def eight() -> str:
    """Eight layers through the policy."""
    cells = {
        name: cell["measured"] for name, cell in _cells().items() if name.startswith("layers/")
    }
    plain = cells["layers/bf16/8192"]
    header = [
        "layers",
        "train, tokens/s",
        "to BF16",
        "log-probs, tokens/s",
        "to BF16",
        "allocated, GiB",
        "loss",
    ]
    rows = []
    for name, of in cells.items():
        rows.append(
            [
                name.split("/")[1],
                f"{of['train_tokens_per_second']:,.0f}",
                f"{of['train_tokens_per_second'] / plain['train_tokens_per_second']:.2f}",
                f"{of['logprobs_tokens_per_second']:,.0f}",
                f"{of['logprobs_tokens_per_second'] / plain['logprobs_tokens_per_second']:.2f}",
                f"{of['step_allocated_bytes'] / GIB:.1f}",
                f"{of['loss']:.4f}",
            ]
        )
    return markdown_table(header, rows)


def sync() -> str:
    """CUDA IPC and checksums."""
    ipc, killed, sums = (
        _measured(f"transport:{name}") for name in ("ipc", "killed_sender", "checksums")
    )
    segments = _measured("transport:expandable_segments")["expandable_segments"]
    return record.wrapped(
        f"On one H200 (`benchmarks/results/{NAME}`), between two processes: CUDA IPC moved "
        f"{ipc['sent_mib']:,.0f} MiB at {ipc['gb_per_s']:.0f} GB/s through the staging buffers; "
        f"a receiver that died was named after {ipc['died_engine_named_s']:.1f} s, a sender that "
        f"died was noticed after {killed['noticed_s']:.2f} s. The checksums run at "
        f"{sums['gb_per_s']:.0f} GB/s. With expandable segments CUDA IPC {segments['on']} too. "
        "NCCL was not reached: its check failed on torch 2.11's `Work.exception`, which the "
        "checks go around by now; they have not run again."
    )


def offload() -> str:
    """Offload to pinned memory."""
    found = _measured("memory:offload")
    # until 2026-11 the check counted the room of gradients too, which do not travel: 4 of the 18
    # bytes of a parameter
    share = 1.0 if "room_mib" in found else 14 / 18
    return record.wrapped(
        f"On one H200 (`benchmarks/results/{NAME}`; plain layers, "
        f"{found.get('room_mib', found['moved_mib']):,.0f} MiB in all; gradients, of which only "
        f"the room is given back, do not count): {share * found['offload_gb_per_s']:.0f} GB/s "
        f"out, {share * found['reload_gb_per_s']:.0f} GB/s back, once pinned memory is there; "
        f"the first time takes {found['first_offload_s']:.2f} s. The device had "
        f"{found['given_back_mib']:,.0f} MiB more afterwards."
    )


def summary() -> str:
    """One sentence."""
    found, loss = _measured("size:memory_and_mfu", "second"), _measured("head:benchmark")["gpu"]
    mfu = [found[f"{tokens} tokens, recompute none"]["mfu"] for tokens in (16384, 32768)]
    ratio = loss["tokens 8192 hidden 5120 vocab 152064 tp 1"]["ratio_to_1_product"]["forward ours"][
        "median"
    ]
    return record.wrapped(
        "- **On one GPU, an H200**, the policy has run, without engines and Ray: layers, head, "
        "optimizer, offload, checkpoints, CUDA IPC and FP8 training against their references; a "
        f"model as large as a rank of 32B at {mfu[0]:.0%} to {mfu[1]:.0%} of the peak, the head "
        f"at {ratio:.2f} times its product. **No run with vLLM, no second GPU and no second "
        "machine yet** ([below](#on-one-gpu))."
    )


TEXTS = {
    "machine": machine, "layers": layers, "head": head, "rank": rank, "off": off, "products": products,
    "eight": eight, "sync": sync, "offload": offload, "summary": summary,
}  # fmt: skip


def main() -> int:
    """Makes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--run", nargs=2, action="append", required=True, metavar=("NAME=FOLDER", "COMMIT")
    )
    arguments = parser.parse_args()
    runs = {}
    for place, commit in arguments.run:
        name, _, folder = place.partition("=")
        runs[name] = (Path(folder), commit)
    record.write(arguments.output, made(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
