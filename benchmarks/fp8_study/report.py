"""Markdown and figure of a study's JSON, with published figures beside it. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fp8_study.cells import BF16

_PUBLISHED = Path(__file__).with_name("published.json")


def write_report(out: Path, report: dict[str, Any]) -> list[Path]:
    """Writes ``study.md``, and ``study.png`` where there is matplotlib and something to draw. Returns what it wrote."""
    published = json.loads(_PUBLISHED.read_text())
    figure = out / "study.png"
    why_none = _draw(figure, report, published)
    text = markdown(report, published, f"![figure]({figure.name})" if why_none is None else f"No figure: {why_none}.")
    (out / "study.md").write_text(text)
    return [out / "study.md", *([figure] if why_none is None else [])]


def markdown(report: dict[str, Any], published: dict[str, Any], figure: str) -> str:
    """The whole page."""
    parts = [
        ["# FP8 study" + (": EMULATED, on a CPU" if report["emulated"] else "")],
        _where(report), [figure], _linear(report), _products(report, published), _scaled_mm(report), _layers(report),
        _whole_model(report), _published(published), _open_cells(report),
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


# ---- where ----------------------------------------------------------------------------------------------------------


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
        + (" with changes" if made["dirty"] else "") + ".", "",
    ]  # fmt: skip
    for gpu in report["hardware"]["gpus"]:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in gpu.items()))
    lines += [f"- {versions}", ""]
    if report["emulated"]:
        lines.append(
            "There was no GPU: FP8 is **emulated** in fp32 on tiny shapes. The errors are those of FP8's rounding; the "
            "times are those of the emulation on this CPU and **say nothing about the speed of a GPU**."
        )
    else:
        lines.append("Nothing here is emulated but the side that te.Linear is compared with.")
    return lines


# ---- tables ---------------------------------------------------------------------------------------------------------


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
            rows.append([
                way, str(row["micro_batch"]), *_three(row["emulation_against_exact"]), found["peer"],
                *_three(row["emulation_against_peer"]),
            ])  # fmt: skip
    if not rows:
        return []
    header = ["recipe", "micro-batch", "y", "dx", "dw", "peer", "y: peer", "dx: peer", "dw: peer"]
    bounds = ", ".join(f"{way} {found['bound']:g}" for way, found in _measured(report, "linear").items())
    return [
        f"## One linear layer ({place(report)})", "",
        "Relative error (Frobenius) of our emulation against exact products, and against the peer, which may differ by "
        f"{bounds}. Under delayed scaling the first micro-batch is multiplied by 1.", "", *_table(header, rows),
    ]  # fmt: skip


def _products(report: dict[str, Any], published: dict[str, Any]) -> list[str]:
    measured = _measured(report, "products")
    if not measured:
        return []
    theirs = published["products"]
    rows = [
        [way, row["name"], str(row["ranks"]), f"{row['inputs']} x {row['outputs']}", _ms(row["forward_seconds"]),
         _ms(row["backward_seconds"]), _ms(row["step_seconds"]), _ms(row["bf16_step_seconds"]), f"{row['tflops']:.3g}",
         f"{row['bf16_tflops']:.3g}", f"{row['ratio']:.2f}"]
        for way, found in measured.items() for row in found["rows"]
    ]  # fmt: skip
    header = ["recipe", "layer", "ranks", "inputs x outputs", "forward ms", "backward ms", "both ms", "BF16 both ms",
              "TFLOP/s", "BF16 TFLOP/s", "BF16 time / FP8 time"]  # fmt: skip
    compared = [
        [way, f"{found['ratio_of_sums']:.2f}", f"{theirs['rows'][way]['ratio']:.2f}" if way in theirs["rows"] else "-"]
        for way, found in measured.items()
    ]
    what = next(iter(measured.values()))["what"]
    note = "BF16 columns are fp32 here. " if report["emulated"] else ""
    together = [
        "", "All shapes together, beside what is published:", "",
        *_table(["recipe", f"here ({place(report)})", "published"], compared), "", f"Published: {theirs['source']}.",
    ]  # fmt: skip
    return [
        f"## Matrix products of the layers ({what}; {place(report)})", "",
        f"{note}Forward and backward (dgrad and wgrad), {report['settings']['products']['tokens']} tokens, "
        "quantization of every operand included. 3 x 2 x tokens x inputs x outputs operations.", "",
        *_table(header, rows),
        *([] if report["emulated"] else together),  # times of an emulation are no neighbors of a GPU's
    ]  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _scaled_mm(report: dict[str, Any]) -> list[str]:
    rows = []
    for scaling, found in _measured(report, "scaled_mm").items():
        for row in found["rows"]:
            values = [row.get(name) for name in ("seconds", "tflops", "bf16_tflops", "ratio", "relative_error")]
            ends = (
                [row["error"], *["-"] * 4] if "error" in row
                else [_ms(values[0]), *(f"{v:.3g}" for v in values[1:3]), f"{values[3]:.2f}", f"{values[4]:.1e}"]
            )  # fmt: skip
            rows.append([scaling, row["name"], str(row["ranks"]), row["product"], *ends])
    if not rows:
        return []
    header = ["scaling", "layer", "ranks", "product", "ms", "TFLOP/s", "BF16 TFLOP/s", "BF16 time / FP8 time", "error"]
    note = " BF16 columns are fp32 here." if report["emulated"] else ""
    return [
        f"## torch's FP8 product alone ({place(report)})", "",
        f"Operands are E4M3 beforehand: the cost of rounding them is not in it.{note}", "", *_table(header, rows),
    ]  # fmt: skip


def _by_tokens(report: dict[str, Any]) -> Iterable[tuple[str, int, dict[str, Any], dict[str, Any] | None]]:
    """Recipe, tokens of a sequence, measurements, those of the same layers without FP8."""
    measured = _measured(report, "layers")
    for name, found in measured.items():
        way, tokens = name.split("/")
        yield way, int(tokens), found, measured.get(f"{BF16}/{tokens}")


def _layers(report: dict[str, Any]) -> list[str]:
    speed, deviation = [], []
    plain_name = "fp32" if report["emulated"] else "BF16"
    for way, tokens, found, plain in _by_tokens(report):
        name = plain_name if way == BF16 else found["recipe"]
        speed.append([
            name, str(tokens), f"{found['train_tokens_per_second']:.4g}", f"{found['step_tokens_per_second']:.4g}",
            f"{found['logprobs_tokens_per_second']:.4g}", f"{found['train_tflops']:.4g}", *_shares(found, "train"),
            f"{found['logprobs_tflops']:.4g}", *_shares(found, "logprobs"), *_memory(found),
        ])  # fmt: skip
        if plain is not None and way != BF16:
            deviation.append([
                name, str(tokens), f"{found['loss']:.6g}", f"{found['loss'] / plain['loss'] - 1:+.2e}",
                f"{found['gradient_norm']:.6g}", f"{found['gradient_norm'] / plain['gradient_norm'] - 1:+.2e}",
                f"{_mean_gap(found, plain):.2e}",
            ])  # fmt: skip
    if not speed:
        return []
    settings = report["settings"]["layers"]
    header = [
        "layers", "sequence", "train tokens/s", "with Adam", "log-prob tokens/s", "train TFLOP/s", "MFU of BF16 peak",
        "MFU of FP8 peak", "log-prob TFLOP/s", "MFU of BF16 peak", "MFU of FP8 peak", "allocated GiB", "reserved GiB",
    ]  # fmt: skip
    peaks = [f"{peak} ({p.upper()})" for p in ("bf16", "fp8") if (peak := report["settings"][f"peak_{p}_tflops"])]
    ends = f" Peaks in TFLOP/s: {', '.join(peaks)}." if peaks else ""
    columns = [
        "layers",
        "sequence",
        "loss",
        "from " + plain_name,
        "gradient norm",
        "from " + plain_name,
        "mean abs dlogp",
    ]
    return [
        f"## {settings['num_layers']} layers through the policy ({place(report)})", "",
        f"Hidden size {settings['hidden']}, {settings['heads']} heads ({settings['kv_heads']} of keys and values), MLP "
        f"{settings['mlp']}, vocabulary {settings['vocabulary']}, random weights, {settings['micro_batches']} "
        "micro-batches of one sequence. Train: forward and backward; the column after it has the optimizer too.", "",
        "Operations: 2 x (multiplications of the layers' matrices x tokens + 2 x layers x heads x head size x n "
        "(n + 1) / 2 of each sequence (causal attention) + hidden x vocabulary x response tokens), three times that in "
        f"training; nothing for recomputation (`openrlhf_ext/megatron/model/flops.py`).{ends}", "",
        *_table(header, speed), "",
        f"The same weights and tokens before any update, beside {plain_name} layers:", "",
        *_table(columns, deviation),
    ]  # fmt: skip


def _mean_gap(found: dict[str, Any], plain: dict[str, Any]) -> float:
    """Mean |dlogp| of the log-probs that were kept, in nats."""
    gaps = [abs(mine - other) for mine, other in zip(found["logprobs"], plain["logprobs"], strict=True)]
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
        [way, str(tokens), f"{found['whole_train_tokens_per_second']:.4g}",
         f"{found['whole_logprobs_tokens_per_second']:.4g}"]
        for way, tokens, found, _ in _by_tokens(report)
    ]  # fmt: skip
    if not rows:
        return []
    settings = report["settings"]["layers"]
    return [
        f"## Extrapolated, not measured: {settings['whole_layers']} layers", "",
        f"Tokens a second of one GPU if all {settings['whole_layers']} layers and a vocabulary of "
        f"{settings['whole_vocabulary']} ran at the TFLOP/s of the {settings['num_layers']} layers above: without "
        "communication, pipeline bubbles, optimizer or any limit of memory.", "",
        *_table(["layers", "sequence", "train tokens/s", "log-prob tokens/s"], rows),
    ]  # fmt: skip


def _published(published: dict[str, Any]) -> list[str]:
    rows = [
        [row["model"], row["gpus"], row["configuration"], row["precision"], str(row["tokens_per_second_per_gpu"]),
         str(row.get("tflops_per_gpu") or "-"), what, row["source"]]
        for what, part in (("training", published["training"]), ("whole RL step", published["whole_rl_steps"]))
        for row in part
    ]  # fmt: skip
    header = ["model", "GPUs", "configuration", "precision", "tokens/s/GPU", "TFLOP/s/GPU", "of", "source"]
    products = published["products"]
    ratios = ", ".join(f"{way} {row['ratio']:.2f}" for way, row in products["rows"].items())
    return [
        "## Published by others, on their machines", "", f"BF16 time / FP8 time of matrix products: {ratios} "
        f"({products['source']}).", "", *_table(header, rows),
    ]  # fmt: skip


def _open_cells(report: dict[str, Any]) -> list[str]:
    rows = [
        [name, row["status"], (row.get("error", "").strip().splitlines() or [""])[-1].replace("|", "/")[:300]]
        for name, row in report["cells"].items()
        if row["status"] != "passed"
    ]
    return ["## Cells without a result", "", *_table(["cell", "status", "why"], rows)] if rows else []


# ---- figure ---------------------------------------------------------------------------------------------------------


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
        errors = [found["micro_batches"][-1]["emulation_against_exact"][name] for found in measured.values()]
        axes.bar([place + 0.27 * (number - 1) for place in range(len(errors))], errors, width=0.25, label=name)
    axes.set_xticks(range(len(measured)), list(measured))
    axes.set_ylabel("relative error of one linear layer")
    axes.legend()


def _draw_deviation(axes: Any, report: dict[str, Any]) -> None:
    for way, tokens, found, plain in _by_tokens(report):
        if way != BF16 and plain is not None:
            axes.bar(f"{way}\n{tokens} tokens", _mean_gap(found, plain), color="tab:orange")
    axes.set_ylabel("mean |dlogp| from fp32 layers, nats")


def _draw_ratios(axes: Any, report: dict[str, Any], published: dict[str, Any]) -> None:
    measured = _measured(report, "products")
    axes.bar(range(len(measured)), [found["ratio_of_sums"] for found in measured.values()], label="here")
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
    for way, tokens, found, _ in _by_tokens(report):
        curves.setdefault(way, []).append((tokens, found["train_tokens_per_second"]))
    for way, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=way)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel(f"train tokens/s of {report['settings']['layers']['num_layers']} layers")
    axes.set_ylim(bottom=0)
    if curves:
        axes.legend()
