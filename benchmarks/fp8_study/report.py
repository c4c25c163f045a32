"""Markdown and figure of a study's JSON, with published figures beside it. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fp8_study.cells import BF16, Cell
from benchmarks.fp8_study.runs import RUNS

WORTH = 1.05
"""What a gain must exceed: less is not worth another rounding."""
_PUBLISHED = Path(__file__).with_name("published.json")


def write_report(out: Path, report: dict[str, Any]) -> list[Path]:
    """Writes ``study.md``, and ``study.png`` where there is matplotlib and something to draw.
    Returns what it wrote."""
    published = json.loads(_PUBLISHED.read_text())
    figure = out / "study.png"
    why_none = _draw(figure, report, published)
    text = markdown(
        report,
        published,
        f"![figure]({figure.name})" if why_none is None else f"No figure: {why_none}.",
    )
    (out / "study.md").write_text(text)
    return [out / "study.md", *([figure] if why_none is None else [])]


def markdown(report: dict[str, Any], published: dict[str, Any], figure: str) -> str:
    """The whole page."""
    parts = [
        ["# FP8 study" + (": EMULATED, on a CPU" if report["emulated"] else "")],
        _where(report),
        [figure],
        _choices(report),
        _steps(report),
        _layers(report),
        _whole_model(report),
        _engines(report),
        _runs(report),
        _linear(report),
        _products(report, published),
        _scaled_mm(report),
        _clocks(report),
        _published(published),
        _open_cells(report),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


# ---- where


def place(report: dict[str, Any]) -> str:
    """On what every number of this report was measured."""
    machine = report["hardware"]
    if report["emulated"]:
        return f"CPU: {machine['cpu']}, {machine['cores']} cores"
    first = machine["gpus"][0] if machine["gpus"] else {"name": "GPU that nvidia-smi does not name"}
    return f"GPU: {first.get('name', first)}"


def _where(report: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)
    made = report["commit"]
    lines = [
        f"Measured on **{place(report)}**, begun {report['started']}, commit {made['commit']}"
        + (" with changes" if made["dirty"] else "")
        + ".",
        "",
    ]
    for gpu in report["hardware"]["gpus"]:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in gpu.items()))
    lines += [f"- {versions}", ""]
    if report["emulated"]:
        lines.append(
            "There was no GPU: FP8 is **emulated** in fp32 on tiny shapes. The errors are those "
            "of FP8's rounding; the times are those of the emulation on this CPU and **say "
            "nothing about the speed of a GPU**."
        )
    else:
        lines.append("Nothing here is emulated but the side that te.Linear is compared with.")
    return lines


# ---- tables


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *lines] if lines else []


def _measured(report: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """What cells of a kind measured, by the rest of their names; of a failed one what it had."""
    return {
        name.partition("/")[2]: row["measured"]
        for name, row in report["cells"].items()
        if name.startswith(f"{kind}/") and "measured" in row
    }


def _three(errors: dict[str, float] | None) -> list[str]:
    return ["-"] * 3 if errors is None else [f"{errors[name]:.2e}" for name in ("y", "dx", "dw")]


def _linear(report: dict[str, Any]) -> list[str]:
    rows = []
    for way, found in _measured(report, "linear").items():
        for row in found["micro_batches"]:
            rows.append(
                [
                    way,
                    str(row["micro_batch"]),
                    *_three(row["emulation_against_exact"]),
                    found["peer"],
                    *_three(row["emulation_against_peer"]),
                ]
            )
    if not rows:
        return []
    header = ["recipe", "micro-batch", "y", "dx", "dw", "peer", "y: peer", "dx: peer", "dw: peer"]
    bounds = ", ".join(
        f"{way} {found['bound']:g}" for way, found in _measured(report, "linear").items()
    )
    return [
        f"## One linear layer ({place(report)})",
        "",
        "Relative error (Frobenius) of our emulation against exact products, and against the "
        f"peer, which may differ by {bounds}. Under delayed scaling the first micro-batch is "
        "multiplied by 1.",
        "",
        *_table(header, rows),
    ]


def _products(report: dict[str, Any], published: dict[str, Any]) -> list[str]:
    measured = _measured(report, "products")
    if not measured:
        return []
    theirs = published["products"]
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
    compared = [
        [
            way,
            f"{found['ratio_of_sums']:.2f}",
            f"{theirs['rows'][way]['ratio']:.2f}" if way in theirs["rows"] else "-",
        ]
        for way, found in measured.items()
    ]
    what = next(iter(measured.values()))["what"]
    note = "BF16 columns are fp32 here. " if report["emulated"] else ""
    together = [
        "",
        "All shapes together, beside what is published:",
        "",
        *_table(["recipe", f"here ({place(report)})", "published"], compared),
        "",
        f"Published: {theirs['source']}.",
    ]
    return [
        f"## Matrix products of the layers ({what}; {place(report)})",
        "",
        f"{note}Forward and backward (dgrad and wgrad), "
        f"{report['settings']['products']['tokens']} tokens, quantization of every operand "
        "included. 3 x 2 x tokens x inputs x outputs operations.",
        "",
        *_table(header, rows),
        # times of an emulation are no neighbors of a GPU's
        *([] if report["emulated"] else together),
    ]


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['device_ratio']:.2f}" if "device_ratio" in row else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _scaled_mm(report: dict[str, Any]) -> list[str]:
    rows = []
    for scaling, found in _measured(report, "scaled_mm").items():
        for row in found["rows"]:
            values = [
                row.get(name)
                for name in ("seconds", "tflops", "bf16_tflops", "ratio", "relative_error")
            ]
            ends = (
                [row["error"], *["-"] * 5]
                if "error" in row
                else [
                    _ms(values[0]),
                    *(f"{v:.3g}" for v in values[1:3]),
                    f"{values[3]:.2f}",
                    _ratio(row),
                    f"{values[4]:.1e}",
                ]
            )
            rows.append([scaling, row["name"], str(row["ranks"]), row["product"], *ends])
    if not rows:
        return []
    header = [
        "scaling",
        "layer",
        "ranks",
        "product",
        "ms",
        "TFLOP/s",
        "BF16 TFLOP/s",
        "BF16 time / FP8 time",
        "of kernels alone",
        "error",
    ]
    note = " BF16 columns are fp32 here." if report["emulated"] else ""
    return [
        f"## torch's FP8 product alone ({place(report)})",
        "",
        f"Operands are E4M3 beforehand: the cost of rounding them is not in it.{note}",
        "",
        *_table(header, rows),
    ]


def _layer_cells(
    report: dict[str, Any],
) -> Iterator[tuple[Cell, dict[str, Any], dict[str, Any] | None]]:
    """Cell, measurements, those of the same layers without FP8."""
    measured = _measured(report, "layers")
    for name, found in measured.items():
        cell = Cell.named(f"layers/{name}")
        yield cell, found, measured.get(cell.plain.name.partition("/")[2])


def _whole(report: dict[str, Any]) -> Iterator[tuple[Cell, dict[str, Any], dict[str, Any] | None]]:
    """The layers that no rank shares and of which nothing is recomputed."""
    return (row for row in _layer_cells(report) if row[0].ranks == 1 and not row[0].variant)


def _layers(report: dict[str, Any]) -> list[str]:
    speed, deviation = [], []
    plain_name = "fp32" if report["emulated"] else "BF16"
    for cell, found, plain in _layer_cells(report):
        name = plain_name if cell.way == BF16 else found["recipe"]
        where = [name, str(cell.tokens), str(cell.ranks), cell.variant or "-"]
        speed.append(
            [
                *where,
                f"{found['train_tokens_per_second']:.4g}",
                f"{found['step_tokens_per_second']:.4g}",
                f"{found['logprobs_tokens_per_second']:.4g}",
                f"{found['train_tflops']:.4g}",
                *_shares(found, "train"),
                f"{found['logprobs_tflops']:.4g}",
                *_shares(found, "logprobs"),
                *_memory(found),
            ]
        )
        if plain is not None and cell.way != BF16:
            deviation.append(
                [
                    *where,
                    f"{found['loss']:.6g}",
                    f"{found['loss'] / plain['loss'] - 1:+.2e}",
                    f"{found['gradient_norm']:.6g}",
                    f"{found['gradient_norm'] / plain['gradient_norm'] - 1:+.2e}",
                    f"{_mean_gap(found, plain):.2e}",
                ]
            )
    if not speed:
        return []
    settings = report["settings"]["layers"]
    places = ["layers", "sequence", "ranks", "variant"]
    header = [
        *places,
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
    peaks = [
        f"{peak} ({p.upper()})"
        for p in ("bf16", "fp8")
        if (peak := report["settings"][f"peak_{p}_tflops"])
    ]
    ends = f" Peaks in TFLOP/s: {', '.join(peaks)}." if peaks else ""
    columns = [
        *places,
        "loss",
        "from " + plain_name,
        "gradient norm",
        "from " + plain_name,
        "mean abs dlogp",
    ]
    return [
        f"## {settings['num_layers']} layers through the policy ({place(report)})",
        "",
        f"Hidden size {settings['hidden']}, {settings['heads']} heads ({settings['kv_heads']} of "
        f"keys and values), MLP {settings['mlp']}, vocabulary {settings['vocabulary']}, random "
        f"weights, {settings['micro_batches']} micro-batches of one sequence. On more than one "
        "rank: heads and MLP of one of them, nothing is communicated, the vocabulary stays. "
        "Variants: everything recomputed; many micro-batches. Train: forward and backward; the "
        "column after it has the optimizer too.",
        "",
        "Operations: 2 x (multiplications of the layers' matrices x tokens + 2 x layers x heads "
        "x head size x n (n + 1) / 2 of each sequence (causal attention) + hidden x vocabulary "
        "x response tokens), three times that in training; nothing for recomputation "
        f"(`openrlhf_ext/megatron/model/flops.py`).{ends}",
        "",
        *_table(header, speed),
        "",
        f"The same weights and tokens before any update, beside {plain_name} layers:",
        "",
        *_table(columns, deviation),
    ]


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


def _steps(report: dict[str, Any]) -> list[str]:
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
    if not rows:
        return []
    header = [
        "layers",
        "sequence",
        "ranks",
        "variant",
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
    return [
        f"## The policy's step: shares, host and device ({place(report)})",
        "",
        "Log-prob pass, forward and backward, and Adam. Step: by the clock, the host included. "
        "Kernels: their own seconds by torch's profiler; where they are far below the step, the "
        f"device waits for the host. The two right columns are of both passes without Adam.{note}",
        "",
        *_table(header, rows),
    ]


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


def _choices(report: dict[str, Any]) -> list[str]:
    found = choices(report)
    if not found:
        return []
    title = ["## Which recipe to take", ""]
    if report["emulated"]:
        return [*title, "An emulation recommends none: its times are not those of FP8's products."]
    rows = [
        [str(choice.ranks), str(choice.tokens), f"**{choice.way}**", choice.why] for choice in found
    ]
    return [
        *title,
        "Rule: the recipe with the least time of kernels in log-prob pass, forward and "
        f"backward, if BF16's take more than {WORTH:g} times as long; else BF16. `_mlp`: FP8 in "
        "MLPs only (`fp8.modules mlp`). Nothing is communicated, which takes the same time "
        f"either way and makes gains smaller. {_closest(report)}",
        "",
        *_table(["ranks", "sequence", "take", "why"], rows),
    ]


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


def _engines(report: dict[str, Any]) -> list[str]:
    names = {
        "start_seconds": "start s",
        "first_batch_seconds": "first batch s",
        "again_seconds": "again s",
        "prefill_tokens_per_second": "prefill tokens/s",
        "decode_tokens_per_second": "decode tokens/s",
        "sleep_seconds": "sleep s",
        "wake_seconds": "wake s",
        "reload_seconds": "reload s",
    }
    rows = [
        [way, *(f"{found[name]:.4g}" if name in found else "-" for name in names)]
        for way, found in _measured(report, "engine").items()
    ]
    if not rows:
        return []
    settings = report["settings"]["engine"]
    return [
        f"## vLLM's engine ({place(report)})",
        "",
        f"{settings['num_layers']} layers of these sizes, random weights, "
        f"{settings['sequences']} sequences of {settings['prompt_tokens']} tokens and "
        f"{settings['new_tokens']} more. The first batch compiles kernels. Reload: weights read "
        "from the disk again, and quantized, after sleep of level 2 where there is a GPU; a run "
        "gets them from the policy instead.",
        "",
        *_table(["engine", *names.values()], rows),
    ]


def _runs(report: dict[str, Any]) -> list[str]:
    phases = ("step", "generate", "logprob", "train", "sync")
    ran = [
        [
            way,
            *(
                f"{found['last_step_seconds'][phase]:.3g}"
                if phase in found["last_step_seconds"]
                else "-"
                for phase in phases
            ),
            f"{found['kl/rollout']:.2e}",
            f"{found['mismatch/mean_abs']:.2e}",
        ]
        for way, found in _measured(report, "run").items()
    ]
    emulated = [
        [row["trainer"], row["rollout"], f"{row['k3_rollout']:.2e}", f"{row['mean_abs']:.2e}"]
        for found in _measured(report, "mismatch").values()
        for row in found["cells"]
    ]
    lines: list[str] = []
    if ran:
        words = ", ".join(
            f"{way}: {' '.join(RUNS[way]) or 'no FP8'}" for way in _measured(report, "run")
        )
        lines += [
            f"## Whole steps of a small random policy ({place(report)})",
            "",
            f"`train_ppo_ray`, seconds of the last "
            f"step and its phases; kl/rollout and mean abs dlogp over all steps. {words}.",
            "",
            *_table(["run", *phases, "kl/rollout", "mean abs dlogp"], ran),
            "",
        ]
    if emulated:
        lines += [
            "## Trainer and engine, EMULATED on both sides",
            "",
            "The same policy; completions that it has sampled without FP8.",
            "",
            *_table(["trainer", "engine", "kl/rollout", "mean abs dlogp"], emulated),
        ]
    return lines


def _clocks(report: dict[str, Any]) -> list[str]:
    names = {"sm_mhz": "SM MHz", "memory_mhz": "memory MHz", "watts": "W", "celsius": "C"}
    rows = []
    for name, row in report["cells"].items():
        if (gpu := row.get("gpu") or {}).get("samples"):
            spans = (gpu[value] for value in names)
            rows.append(
                [
                    name,
                    str(gpu["busy_samples"]),
                    *(f"{s['min']:g} / {s['median']:g} / {s['max']:g}" for s in spans),
                ]
            )
    if not rows:
        return []
    return [
        "## Clocks and power while the cells ran",
        "",
        "Least, median and largest of the samples in which the GPU was busy (of all, if in none).",
        "",
        *_table(["cell", "busy samples", *names.values()], rows),
    ]


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


def _whole_model(report: dict[str, Any]) -> list[str]:
    if report["emulated"]:
        return []
    rows = [
        [
            cell.way,
            str(cell.tokens),
            f"{found['whole_train_tokens_per_second']:.4g}",
            f"{found['whole_logprobs_tokens_per_second']:.4g}",
        ]
        for cell, found, _ in _whole(report)
    ]
    if not rows:
        return []
    settings = report["settings"]["layers"]
    return [
        f"## Extrapolated, not measured: {settings['whole_layers']} layers",
        "",
        f"Tokens a second of one GPU if all {settings['whole_layers']} layers and a vocabulary of "
        f"{settings['whole_vocabulary']} ran at the TFLOP/s of the {settings['num_layers']} "
        "layers above: without communication, pipeline bubbles, optimizer or any limit of "
        "memory.",
        "",
        *_table(["layers", "sequence", "train tokens/s", "log-prob tokens/s"], rows),
    ]


def _published(published: dict[str, Any]) -> list[str]:
    rows = [
        [
            row["model"],
            row["gpus"],
            row["configuration"],
            row["precision"],
            str(row["tokens_per_second_per_gpu"]),
            str(row.get("tflops_per_gpu") or "-"),
            what,
            row["source"],
        ]
        for what, part in (
            ("training", published["training"]),
            ("whole RL step", published["whole_rl_steps"]),
        )
        for row in part
    ]
    header = [
        "model",
        "GPUs",
        "configuration",
        "precision",
        "tokens/s/GPU",
        "TFLOP/s/GPU",
        "of",
        "source",
    ]
    products = published["products"]
    ratios = ", ".join(f"{way} {row['ratio']:.2f}" for way, row in products["rows"].items())
    return [
        "## Published by others, on their machines",
        "",
        f"BF16 time / FP8 time of matrix products: {ratios} ({products['source']}).",
        "",
        *_table(header, rows),
    ]


def _open_cells(report: dict[str, Any]) -> list[str]:
    rows = [
        [
            name,
            row["status"],
            (row.get("error", "").strip().splitlines() or [""])[-1].replace("|", "/")[:300],
        ]
        for name, row in report["cells"].items()
        if row["status"] != "passed"
    ]
    return (
        ["## Cells without a result", "", *_table(["cell", "status", "why"], rows)] if rows else []
    )


# ---- figure


def _draw(file: Path, report: dict[str, Any], published: dict[str, Any]) -> str | None:
    """Writes the figure: errors of an emulation, speed of a GPU. Returns why there is none."""
    if not any(_measured(report, kind) for kind in ("linear", "products", "layers")):
        return "no cell has measured anything to draw"
    if importlib.util.find_spec("matplotlib") is None:
        return "there is no matplotlib here; --render makes it from study.json where there is"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    if report["emulated"]:
        _draw_errors(left, report)
        _draw_deviation(right, report)
    else:
        _draw_ratios(left, report, published)
        _draw_rates(right, report)
    emulated = "EMULATED: errors of rounding, no speed\n" if report["emulated"] else ""
    figure.suptitle(f"{emulated}{place(report)}", fontsize=10)
    figure.savefig(file, dpi=120)
    return None


def _draw_errors(axes: Any, report: dict[str, Any]) -> None:
    """Of the last micro-batch, when delayed scales have seen others."""
    measured = _measured(report, "linear")
    for number, name in enumerate(("y", "dx", "dw")):
        errors = [
            found["micro_batches"][-1]["emulation_against_exact"][name]
            for found in measured.values()
        ]
        axes.bar(
            [place + 0.27 * (number - 1) for place in range(len(errors))],
            errors,
            width=0.25,
            label=name,
        )
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set_ylabel("relative error of one linear layer")
    axes.legend()


def _draw_deviation(axes: Any, report: dict[str, Any]) -> None:
    for cell, found, plain in _whole(report):
        if cell.way != BF16 and plain is not None:
            axes.bar(
                f"{cell.way}\n{cell.tokens} tokens", _mean_gap(found, plain), color="tab:orange"
            )
    axes.set_ylabel("mean |dlogp| from fp32 layers, nats")


def _draw_ratios(axes: Any, report: dict[str, Any], published: dict[str, Any]) -> None:
    measured = _measured(report, "products")
    axes.bar(
        range(len(measured)), [found["ratio_of_sums"] for found in measured.values()], label="here"
    )
    for number, way in enumerate(measured):
        if way in published["products"]["rows"]:
            ratio = published["products"]["rows"][way]["ratio"]
            label = None if axes.get_lines() else "TransformerEngine's, H200 NVL"
            axes.plot([number - 0.4, number + 0.4], [ratio, ratio], "k--", label=label)
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set_ylabel("BF16 time / FP8 time, products of the layers")
    axes.legend()


def _draw_rates(axes: Any, report: dict[str, Any]) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for cell, found, _ in _whole(report):
        curves.setdefault(cell.way, []).append((cell.tokens, found["train_tokens_per_second"]))
    for way, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=way)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel(f"train tokens/s of {report['settings']['layers']['num_layers']} layers")
    axes.set_ylim(bottom=0)
    if curves:
        axes.legend()
