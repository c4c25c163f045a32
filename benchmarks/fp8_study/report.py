"""Markdown of a study's JSON. Needs no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fp8_study.cells import BF16, Cell
from benchmarks.fp8_study.runs import RUNS
from benchmarks.harness import markdown_table

WORTH = 1.05
"""What a gain must exceed: less is not worth another rounding."""
PUBLISHED = Path(__file__).with_name("published.json")


def write_report(out: Path, report: dict[str, Any]) -> Path:
    """Writes ``study.md``."""
    page = out / "study.md"
    page.write_text(markdown(report))
    return page


def markdown(report: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        "# FP8 study" + (": EMULATED, on a CPU" if report["emulated"] else ""),
        _where(report),
        _choices(report),
        _steps(report),
        _layers(report),
        _deviations(report),
        _engines(report),
        _runs(report),
        _emulated(report),
        _linear(report),
        _products(report),
        _clocks(report),
        _open_cells(report),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _section(title: str, about: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Empty if there are no rows."""
    return f"## {title}\n\n{about}\n\n{markdown_table(header, rows)}" if rows else ""


# ---- where


def place(report: dict[str, Any]) -> str:
    """On what every number of this report was measured."""
    machine = report["hardware"]
    if report["emulated"]:
        return f"CPU: {machine['cpu']}, {machine['cores']} cores"
    first = machine["gpus"][0] if machine["gpus"] else {"name": "GPU that nvidia-smi does not name"}
    return f"GPU: {first.get('name', first)}"


def _where(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    made = report["commit"]
    changes = " with changes" if made["dirty"] else ""
    gpus = [
        "- " + ", ".join(f"{name} {value}" for name, value in gpu.items())
        for gpu in report["hardware"]["gpus"]
    ]
    emulated = (
        "There was no GPU: FP8 is **emulated** in fp32 on tiny shapes. The errors are those of "
        "FP8's rounding; the times are those of the emulation on this CPU and **say nothing about "
        "the speed of a GPU**."
    )
    return "\n".join(
        [
            f"Measured on **{place(report)}**, begun {report['started']}, commit "
            f"{made['commit']}{changes}.",
            "",
            *gpus,
            f"- {versions}",
            "",
            emulated
            if report["emulated"]
            else "Nothing here is emulated but the side that te.Linear is compared with.",
        ]
    )


# ---- tables


def _measured(report: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """What cells of a kind measured, by the rest of their names; of a failed one what it had."""
    return {
        name.partition("/")[2]: row["measured"]
        for name, row in report["cells"].items()
        if name.startswith(f"{kind}/") and "measured" in row
    }


def _three(errors: dict[str, float] | None) -> list[str]:
    return ["-"] * 3 if errors is None else [f"{errors[name]:.2e}" for name in ("y", "dx", "dw")]


def _linear(report: dict[str, Any]) -> str:
    measured = _measured(report, "linear")
    rows = [
        [
            way,
            str(row["micro_batch"]),
            *_three(row["emulation_against_exact"]),
            found["peer"],
            *_three(row["emulation_against_peer"]),
        ]
        for way, found in measured.items()
        for row in found["micro_batches"]
    ]
    bounds = ", ".join(f"{way} {found['bound']:g}" for way, found in measured.items())
    return _section(
        f"One linear layer ({place(report)})",
        "Relative error (Frobenius) of our emulation against exact products, and against the "
        f"peer, which may differ by {bounds}. Under delayed scaling the first micro-batch is "
        "multiplied by 1.",
        ["recipe", "micro-batch", "y", "dx", "dw", "peer", "y: peer", "dx: peer", "dw: peer"],
        rows,
    )


def _products(report: dict[str, Any]) -> str:
    measured = _measured(report, "products")
    if not measured:
        return ""
    rows = [
        [
            way,
            row["name"],
            str(row["ranks"]),
            f"{row['inputs']} x {row['outputs']}",
            _ms(row["forward_seconds"]),
            _ms(row["backward_seconds"]),
            _ms(row["step_seconds"]),
            _ms(row["bf16_step_seconds"]),
            f"{row['tflops']:.3g}",
            f"{row['bf16_tflops']:.3g}",
            f"{row['ratio']:.2f}",
            _ratio(row),
        ]
        for way, found in measured.items()
        for row in found["rows"]
    ]
    header = [
        "recipe",
        "layer",
        "ranks",
        "inputs x outputs",
        "forward ms",
        "backward ms",
        "both ms",
        "BF16 both ms",
        "TFLOP/s",
        "BF16 TFLOP/s",
        "BF16 time / FP8 time",
        "of kernels alone",
    ]
    note = "BF16 columns are fp32 here. " if report["emulated"] else ""
    page = _section(
        f"Matrix products of the layers ({next(iter(measured.values()))['what']}; {place(report)})",
        f"{note}Forward and backward (dgrad and wgrad), "
        f"{report['settings']['products']['tokens']} tokens, quantization of every operand "
        "included. 3 x 2 x tokens x inputs x outputs operations.",
        header,
        rows,
    )
    # times of an emulation are no neighbors of a GPU's
    return page if report["emulated"] else f"{page}\n\n{_beside_published(report, measured)}"


def _beside_published(report: dict[str, Any], measured: dict[str, dict[str, Any]]) -> str:
    theirs = json.loads(PUBLISHED.read_text())["products"]
    rows = [
        [
            way,
            f"{found['ratio_of_sums']:.2f}",
            f"{theirs['rows'][way]['ratio']:.2f}" if way in theirs["rows"] else "-",
        ]
        for way, found in measured.items()
    ]
    table = markdown_table(["recipe", f"here ({place(report)})", "published"], rows)
    return f"All shapes together:\n\n{table}\n\nPublished: {theirs['source']}."


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['device_ratio']:.2f}" if "device_ratio" in row else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _layer_cells(
    report: dict[str, Any],
) -> Iterator[tuple[Cell, dict[str, Any], dict[str, Any] | None]]:
    """Cell, measurements, those of the same layers without FP8."""
    measured = _measured(report, "layers")
    for name, found in measured.items():
        cell = Cell.named(f"layers/{name}")
        yield cell, found, measured.get(cell.plain.name.partition("/")[2])


def _layers(report: dict[str, Any]) -> str:
    rows = [
        [
            *_layer_name(report, cell, found),
            f"{found['train_tokens_per_second']:.4g}",
            f"{found['step_tokens_per_second']:.4g}",
            f"{found['logprobs_tokens_per_second']:.4g}",
            f"{found['train_tflops']:.4g}",
            *_shares(found, "train"),
            f"{found['logprobs_tflops']:.4g}",
            *_shares(found, "logprobs"),
            *_memory(found),
        ]
        for cell, found, _ in _layer_cells(report)
    ]
    header = [
        *_PLACES,
        "train tokens/s",
        "with Adam",
        "log-prob tokens/s",
        "train TFLOP/s",
        "MFU of BF16 peak",
        "MFU of FP8 peak",
        "log-prob TFLOP/s",
        "MFU of BF16 peak",
        "MFU of FP8 peak",
        "allocated GiB",
        "reserved GiB",
    ]
    settings = report["settings"]["layers"]
    peaks = [
        f"{peak} ({p.upper()})"
        for p in ("bf16", "fp8")
        if (peak := report["settings"][f"peak_{p}_tflops"])
    ]
    ends = f" Peaks in TFLOP/s: {', '.join(peaks)}." if peaks else ""
    about = (
        f"Hidden size {settings['hidden']}, {settings['heads']} heads ({settings['kv_heads']} of "
        f"keys and values), MLP {settings['mlp']}, vocabulary {settings['vocabulary']}, random "
        f"weights, {settings['micro_batches']} micro-batches of one sequence. On more than one "
        "rank: heads and MLP of one of them, nothing is communicated, the vocabulary stays. "
        "Variants: everything recomputed; many micro-batches. Train: forward and backward; the "
        "column after it has the optimizer too.\n\n"
        "Operations: 2 x (multiplications of the layers' matrices x tokens + 2 x layers x heads "
        "x head size x n (n + 1) / 2 of each sequence (causal attention) + hidden x vocabulary "
        "x response tokens), three times that in training; nothing for recomputation "
        f"(`openrlhf_ext/megatron/model/flops.py`).{ends}"
    )
    title = f"{settings['num_layers']} layers through the policy ({place(report)})"
    return _section(title, about, header, rows)


_PLACES = ("layers", "sequence", "ranks", "variant")


def _layer_name(report: dict[str, Any], cell: Cell, found: dict[str, Any]) -> list[str]:
    name = _plain_name(report) if cell.way == BF16 else found["recipe"]
    return [name, str(cell.tokens), str(cell.ranks), cell.variant or "-"]


def _plain_name(report: dict[str, Any]) -> str:
    return "fp32" if report["emulated"] else "BF16"


def _deviations(report: dict[str, Any]) -> str:
    rows = [
        [
            *_layer_name(report, cell, found),
            f"{found['loss']:.6g}",
            f"{found['loss'] / plain['loss'] - 1:+.2e}",
            f"{found['gradient_norm']:.6g}",
            f"{found['gradient_norm'] / plain['gradient_norm'] - 1:+.2e}",
            f"{_mean_gap(found, plain):.2e}",
        ]
        for cell, found, plain in _layer_cells(report)
        if plain is not None and cell.way != BF16
    ]
    beside = _plain_name(report)
    return _section(
        f"Loss, gradients, and log-probs beside {beside} layers",
        "The same weights and tokens before any update.",
        [
            *_PLACES,
            "loss",
            f"from {beside}",
            "gradient norm",
            f"from {beside}",
            "mean abs dlogp",
        ],
        rows,
    )


# ---- device and host, shares, and which recipe to take


_PARTS = ("logprobs", "forward_backward", "optimizer")


class _Times(NamedTuple):
    """Seconds of a log-prob pass, of forward and backward, and of the optimizer: on the clock, and
    of kernels."""

    host: tuple[float, ...]
    device: tuple[float, ...]

    @classmethod
    def of(cls, found: dict[str, Any]) -> _Times | None:
        """None: an earlier study, which has no time of the device."""
        if "logprobs_kernels" not in found:
            return None
        passes = found["logprobs_seconds"], found["forward_backward_seconds"]
        device = tuple(found[f"{part}_kernels"]["device_seconds"] for part in _PARTS)
        return cls((*passes, max(0.0, found["step_seconds"] - passes[1])), device)

    def speedup(self, plain: _Times) -> tuple[float, float]:
        """Of both passes together, device and host: the optimizer's time is not FP8's, and its
        share falls with the number of micro-batches."""
        return sum(plain.device[:2]) / sum(self.device[:2]), sum(plain.host[:2]) / sum(
            self.host[:2]
        )


def _steps(report: dict[str, Any]) -> str:
    rows = []
    for cell, found, plain in _layer_cells(report):
        times, beside = _Times.of(found), _Times.of(plain or {})
        if times is None:
            continue
        gains = ["-"] * 2 if beside is None else [f"{gain:.2f}" for gain in times.speedup(beside)]
        host = sum(times.host)
        rows.append(
            [
                cell.way,
                str(cell.tokens),
                str(cell.ranks),
                cell.variant or "-",
                _ms(host),
                _ms(sum(times.device)),
                *(f"{part / host:.0%}" for part in times.host),
                *_largest(found),
                *gains,
            ]
        )
    header = [
        *_PLACES,
        "step ms",
        "kernels ms",
        "log-probs",
        "forward and backward",
        "optimizer",
        "most of forward and backward",
        "BF16 kernels / these",
        "BF16 time / this time",
    ]
    note = " On this CPU kernels are torch's operations." if report["emulated"] else ""
    return _section(
        f"The policy's step: shares, host and device ({place(report)})",
        "Log-prob pass, forward and backward, and Adam. Step: by the clock, the host included. "
        "Kernels: their own seconds by torch's profiler; where they are far below the step, the "
        f"device waits for the host. The two right columns are of both passes without Adam.{note}",
        header,
        rows,
    )


def _largest(found: dict[str, Any]) -> list[str]:
    kernels = found["forward_backward_kernels"]
    top = list(kernels["groups"].items())[:3]
    return [", ".join(f"{name} {seconds / kernels['device_seconds']:.0%}" for name, seconds in top)]


class Choice(NamedTuple):
    """What to take for layers of a rank. ``way``: a recipe, or 'bf16'."""

    ranks: int
    tokens: int
    way: str
    why: str


def choices(report: dict[str, Any]) -> list[Choice]:
    """For every number of ranks and length: the recipe whose kernels take least time, if BF16's
    take more than ``WORTH`` times as much; else BF16."""
    by_place: dict[tuple[int, int], dict[str, tuple[float, float]]] = {}
    for cell, found, plain in _layer_cells(report):
        times, beside = _Times.of(found), _Times.of(plain or {})
        if not (cell.variant or cell.way == BF16 or times is None or beside is None):
            by_place.setdefault((cell.ranks, cell.tokens), {})[cell.way] = times.speedup(beside)
    return [_choice(*where, gains) for where, gains in sorted(by_place.items())]


def _choice(ranks: int, tokens: int, gains: dict[str, tuple[float, float]]) -> Choice:
    best, *others = sorted(gains, key=lambda way: -gains[way][0])
    device, host = gains[best]
    then = ", ".join(f"{way} {gains[way][0]:.2f}" for way in others)
    why = f"{best}: {device:.2f} on the device, {host:.2f} by the clock" + (
        f"; then {then}" if then else ""
    )
    if device <= WORTH:
        return Choice(ranks, tokens, BF16, f"none is above {WORTH:g}; {why}")
    if host < device / WORTH:
        why += "; the host cannot keep up with it"
    return Choice(ranks, tokens, best, why)


def _choices(report: dict[str, Any]) -> str:
    found = choices(report)
    title = "Which recipe to take"
    if found and report["emulated"]:
        return (
            f"## {title}\n\nAn emulation recommends none: its times are not those of FP8's "
            "products."
        )
    rows = [
        [str(choice.ranks), str(choice.tokens), f"**{choice.way}**", choice.why] for choice in found
    ]
    return _section(
        title,
        "Rule: the recipe with the least time of kernels in log-prob pass, forward and "
        f"backward, if BF16's take more than {WORTH:g} times as long; else BF16. `_mlp`: FP8 in "
        "MLPs only (`fp8.modules mlp`). Nothing is communicated, which takes the same time "
        f"either way and makes gains smaller. {_closest(report)}",
        ["ranks", "sequence", "take", "why"],
        rows,
    )


def _closest(report: dict[str, Any]) -> str:
    """The sentence on engines; what ran counts more than what was emulated."""
    ran = {
        way: found["kl/rollout"]
        for way, found in _measured(report, "run").items()
        if "fp8.rollout_enable" in RUNS[way]
    }
    emulated = {
        row["trainer"]: row["k3_rollout"]
        for found in _measured(report, "mismatch").values()
        for row in found["cells"]
        if row["rollout"] == "blockwise"
    }
    for what, gaps in (("in runs", ran), ("emulated", emulated)):
        if len(gaps) > 1:
            first = min(gaps, key=lambda way: gaps[way])
            return f"Closest to FP8 engines, {what}: {first} (kl/rollout {gaps[first]:.2e})."
    return "Beside FP8 engines the recipe of the engines counts too: see `kl/rollout`."


# ---- engines, runs, clocks


_ENGINE = {
    "start_seconds": "start s",
    "first_batch_seconds": "first batch s",
    "again_seconds": "again s",
    "prefill_tokens_per_second": "prefill tokens/s",
    "decode_tokens_per_second": "decode tokens/s",
}


def _engines(report: dict[str, Any]) -> str:
    rows = [
        [way, *(f"{found[name]:.4g}" if name in found else "-" for name in _ENGINE)]
        for way, found in _measured(report, "engine").items()
    ]
    settings = report["settings"]["engine"]
    return _section(
        f"vLLM's engine ({place(report)})",
        f"{settings['num_layers']} layers of these sizes, random weights, "
        f"{settings['sequences']} sequences of {settings['prompt_tokens']} tokens and "
        f"{settings['new_tokens']} more. The first batch compiles kernels.",
        ["engine", *_ENGINE.values()],
        rows,
    )


def _runs(report: dict[str, Any]) -> str:
    phases = ("step", "generate", "logprob", "train", "sync")
    measured = _measured(report, "run")
    rows = []
    for way, found in measured.items():
        seconds = found["last_step_seconds"]
        rows.append(
            [
                way,
                *(f"{seconds[phase]:.3g}" if phase in seconds else "-" for phase in phases),
                f"{found['kl/rollout']:.2e}",
                f"{found['mismatch/mean_abs']:.2e}",
            ]
        )
    words = ", ".join(f"{way}: {' '.join(RUNS[way]) or 'no FP8'}" for way in measured)
    return _section(
        f"Whole steps of a small random policy ({place(report)})",
        "`train_ppo_ray`, seconds of the last step and its phases; kl/rollout and mean abs dlogp "
        f"over all steps. {words}.",
        ["run", *phases, "kl/rollout", "mean abs dlogp"],
        rows,
    )


def _emulated(report: dict[str, Any]) -> str:
    rows = [
        [row["trainer"], row["rollout"], f"{row['k3_rollout']:.2e}", f"{row['mean_abs']:.2e}"]
        for found in _measured(report, "mismatch").values()
        for row in found["cells"]
    ]
    return _section(
        "Trainer and engine, EMULATED on both sides",
        "The same policy; completions that it has sampled without FP8.",
        ["trainer", "engine", "kl/rollout", "mean abs dlogp"],
        rows,
    )


def _clocks(report: dict[str, Any]) -> str:
    names = {"sm_mhz": "SM MHz", "memory_mhz": "memory MHz", "watts": "W", "celsius": "C"}
    rows = []
    for name, row in report["cells"].items():
        if (gpu := row.get("gpu") or {}).get("samples"):
            spans = (gpu[value] for value in names)
            spread = (f"{s['min']:g} / {s['median']:g} / {s['max']:g}" for s in spans)
            rows.append([name, str(gpu["busy_samples"]), *spread])
    return _section(
        "Clocks and power while the cells ran",
        "Least, median and largest of the samples in which the GPU was busy (of all, if in none).",
        ["cell", "busy samples", *names.values()],
        rows,
    )


def _mean_gap(found: dict[str, Any], plain: dict[str, Any]) -> float:
    """Mean |dlogp| of the log-probs that were kept, in nats."""
    gaps = [
        abs(mine - other) for mine, other in zip(found["logprobs"], plain["logprobs"], strict=True)
    ]
    return math.fsum(gaps) / len(gaps)


def _shares(found: dict[str, Any], what: str) -> list[str]:
    names = [f"{what}_mfu_{precision}" for precision in ("bf16", "fp8")]
    return [f"{found[name]:.1%}" if name in found else "-" for name in names]


def _memory(found: dict[str, Any]) -> list[str]:
    names = ("step_allocated_bytes", "step_reserved_bytes")
    return [f"{found[name] / 2**30:.1f}" if name in found else "-" for name in names]


def _open_cells(report: dict[str, Any]) -> str:
    rows = [
        [
            name,
            row["status"],
            (row.get("error", "").strip().splitlines() or [""])[-1].replace("|", "/")[:300],
        ]
        for name, row in report["cells"].items()
        if row["status"] != "passed"
    ]
    return _section(
        "Cells without a result", "The last line of each error.", ["cell", "status", "why"], rows
    )
