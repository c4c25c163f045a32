"""The command of the FP8 study as a user types it, here on the CPU; and what becomes of cells that
fail or are late."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fp8_study import engine, linear, products, runs
from benchmarks.fp8_study import run as fp8_study
from benchmarks.fp8_study.cells import Cell, cells_of
from benchmarks.fp8_study.report import choices, write_report
from benchmarks.fp8_study.settings import RECIPES, SettingsError, read_study
from openrlhf_ext.fp8.quantize import Products
from openrlhf_ext.fp8.recipe import Recipe
from tests.gpu.kit import Machine, Partly
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
LINEAR = (
    "kinds: [linear]\nrecipes: [current]\nlinear: {tokens: 64, inputs: 128, outputs: 64, "
    "micro_batches: 2}\n"
)

WITHOUT = """
import sys
from importlib.machinery import PathFinder

ABSENT = ("ray", "vllm", "openrlhf", "deepspeed", "mbridge", "transformers", "huggingface_hub", "datasets")

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


class Study:
    """A study in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"

    def words(self, options: str | None, *arguments: str) -> list[str]:
        """Of the command, with these options in a file."""
        if options is None:
            return [*arguments, "--out", str(self.out)]
        (self.folder / "study.yaml").write_text(options)
        return [*arguments, "--out", str(self.out), str(self.folder / "study.yaml")]

    def command(self, options: str, *arguments: str, **environment: str) -> tuple[int, str]:
        """As a user types it: exit code and what was printed."""
        done = subprocess.run(
            ["bash", "examples/scripts/fp8_study.sh", *self.words(options, *arguments)],
            cwd=ROOT,
            timeout=PATIENCE_S,
            env=os.environ | {"PYTHON": sys.executable} | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout

    def main(self, options: str | None, *arguments: str) -> tuple[int, str]:
        """The same without another process that imports torch; the cells have processes of their
        own."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = fp8_study.main(self.words(options, *arguments))
        return code, printed.getvalue()

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.out / "study.json").read_text())

    @property
    def statuses(self) -> dict[str, str]:
        return {name: row["status"] for name, row in self.report["cells"].items()}


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path)


@pytest.mark.slow
def test_a_sweep_on_a_cpu_is_emulated_says_so_and_goes_on_where_it_ended(
    study: Study, monkeypatch
) -> None:
    options = (
        "recipes: [current]\nlinear: {tokens: 64}\nproducts: {tokens: 64, tensor_parallel: [1], "
        "repeats: 1}\nlayers: {num_layers: 1, sequences: [32], tensor_parallel: [2], variants: "
        "[], repeats: 1}\nrun: {ways: [engines]}\n"
    )
    (study.folder / "sitecustomize.py").write_text(WITHOUT)
    code, text = study.command(
        options, "--minutes", str(PATIENCE_S / 60), PYTHONPATH=str(study.folder)
    )
    elsewhere = ["engine/bf16", "engine/blockwise", "mismatch/emulated", "run/engines"]
    names = [
        "linear/current",
        "products/current",
        "layers/bf16/32/tp2",
        "layers/current/32/tp2",
        "layers/current_mlp/32/tp2",
        *elsewhere,
    ]
    assert code == 0 and list(study.statuses) == names, text
    others = {n for n, status in study.statuses.items() if status != "passed"}
    assert others == {*elsewhere}, text
    cells = study.report["cells"]
    assert "not installed here: ray, vllm, openrlhf, transformers" in cells["run/engines"]["error"]
    plain, fp8, mlp = (
        cells[f"layers/{way}/32/tp2"]["measured"] for way in ("bf16", "current", "current_mlp")
    )
    assert mlp["recipe"] == "current hybrid fp32, MLPs only, EMULATED" and mlp["loss"] not in (
        plain["loss"],
        fp8["loss"],
    )
    for part in ("logprobs", "forward_backward", "optimizer"):
        assert fp8[f"{part}_kernels"]["device_seconds"] > 0, part
    assert fp8["logprobs_kernels"]["groups"]["products"] > 0
    gaps = [abs(a - b) for a, b in zip(plain["logprobs"], fp8["logprobs"], strict=True)]
    assert 1e-3 < sum(gaps) / len(gaps) < 1, "rounding to FP8 moves log-probs, and not by much"
    assert fp8["recipe"] == "current hybrid fp32, EMULATED" and plain["recipe"] == "none"
    for name in ("train_tokens_per_second", "logprobs_tflops", "step_seconds", "gradient_norm"):
        assert fp8[name] > 0, name
    page = (study.out / "study.md").read_text()
    for said in (
        "# FP8 study: EMULATED, on a CPU",
        "say nothing about the speed of a GPU",
        study.report["hardware"]["cpu"],
        "Relative error",
        "none on a CPU",
        "mean abs dlogp",
        "An emulation recommends none",
        "| current | 32 | 2 | - |",
    ):
        assert said in page, said
    monkeypatch.setattr(
        fp8_study, "_NEEDS", dict.fromkeys(("engine", "mismatch", "run"), ("no_such_package",))
    )
    code, text = study.main(options)
    assert code == 0 and len(text.splitlines()) == 1 + len(elsewhere), text
    again = study.report["cells"]
    asked = {again.pop(name)["error"] for name in elsewhere}
    assert asked == {"not installed here: no_such_package (--bundle)"}, (
        "packages may be there the next time"
    )
    assert again == {name: row for name, row in cells.items() if name not in elsewhere}, (
        "nothing was measured again"
    )
    with pytest.raises(
        SettingsError,
        match="was measured with setting linear = (.|\n)*Name another folder with --out",
    ):
        study.main(options.replace("linear: {tokens: 64}", "linear: {tokens: 32}"))


def test_time_that_is_up_ends_it_and_the_next_run_goes_on(study: Study) -> None:
    code, text = study.main(LINEAR, "--minutes", "0.05")
    assert code == 2 and set(study.statuses.values()) == {"not run"}, text
    assert (
        "the same command goes on" in text
        and "not run: time was up" in (study.out / "study.md").read_text()
    )
    code, text = study.main(LINEAR, "--minutes", str(PATIENCE_S / 60))
    assert code == 0 and study.statuses == {"linear/current": "passed"}, text
    for row in study.report["cells"]["linear/current"]["measured"]["micro_batches"]:
        assert row["emulation_against_peer"] is None
        assert 0.03 < row["emulation_against_exact"]["y"] < 0.045


def test_a_cell_that_fails_is_a_row_with_its_error_and_is_tried_again(study: Study) -> None:
    """No process imports torch within its limit."""
    for _ in range(2):
        code, text = study.main(LINEAR + "cell_seconds: 0.2\n", "--minutes", "5")
        row = study.report["cells"]["linear/current"]
        assert code == 1 and row["status"] == "failed" and "limit of 0.2 s" in row["error"], text
        assert re.search(r"linear/current +failed +[\d.]+ s  it was ended", text), (
            "it was tried again"
        )
    page = (study.out / "study.md").read_text()
    assert (
        "## Cells without a result" in page
        and "| linear/current | failed | it was ended at its limit" in page
    )


def test_layers_that_compute_what_unquantized_ones_do_have_failed() -> None:
    from benchmarks.fp8_study.run import _require_active

    same = {"status": "passed", "measured": {"logprobs": [-1.0, -2.0]}}
    rows = {"layers/bf16/64": same}
    found = _require_active(Cell("layers", "blockwise", 64), same, rows)
    assert found["status"] == "failed" and "FP8 is not active" in found["error"]
    other = {"status": "passed", "measured": {"logprobs": [-1.0, -2.5]}}
    assert _require_active(Cell("layers", "blockwise", 64), other, rows) == other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "linear: {tokens: -3}",
            r"linear\.tokens must be a whole number of 1 or more, got -3; the default is 128",
        ),
        (
            "linear: {token: 3}",
            r"there is no option linear\.token; these are known here: tokens, inputs",
        ),
        (
            "kinds: [speed]",
            "kinds must be a list of some of linear, products, layers, engine, mismatch, run, got",
        ),
        ("recipes: [mxfp8]", "recipes must be a list of some of blockwise, current, delayed, got"),
        ("layers: 8", r"layers must have options of its own \(num_layers, .*\), got 8"),
        ("layers: {mlp: 100}", r"layers\.mlp must be a multiple of 16, got 100"),
        (
            "layers: {tensor_parallel: [3]}",
            r"layers\.heads over 3 ranks must be a multiple of 16, got 85",
        ),
        (
            "layers: {tensor_parallel: [4]}",
            r"layers\.heads 2 must be a multiple of 4 ranks: choose fewer",
        ),
        (
            "layers: {variants: [fast]}",
            r"layers\.variants must be a list of some of recompute, many, or an empty one",
        ),
        ("run: {ways: [fp4]}", r"run\.ways must be a list of some of none, engines, blockwise"),
        (
            "products: {tensor_parallel: [3]}",
            r"products\.columns\.qkv over 3 ranks must be a multiple of 16, got 170",
        ),
        (
            "peak_bf16_tflops: fast",
            "peak_bf16_tflops must be a number above 0, or null for none, got 'fast'",
        ),
        ("- a list", "must have options and their values"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_what_a_study_may_not_say(tmp_path: Path, options: str, message: str) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(options)
    with pytest.raises(SettingsError, match=message):
        read_study(file, on_gpu=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "--minutes must be above 0, got 0"),
        (["--bundle", "nowhere"], "--bundle must be a folder"),
        (["--render"], "--render needs .*study.json"),
    ],
)
def test_what_cannot_work_is_refused(study: Study, words: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        study.main(None, *words)
    assert not study.out.exists()


def test_the_command_says_what_is_wrong_in_a_line(study: Study) -> None:
    code, text = study.command("linear: {tokens: 0}")
    assert code == 1 and not study.out.exists(), text
    assert re.fullmatch(
        r"fp8_study: .*study.yaml: linear\.tokens must be a whole number.*\n", text
    ), text


def test_a_share_of_another_gpus_peak_is_refused() -> None:
    from benchmarks.fp8_study.run import _require_peak

    asked = read_study(None, on_gpu=True)
    _require_peak(asked, [{"name": "NVIDIA H200"}])
    _require_peak(asked, [{"name": "a GPU of next year"}])
    with pytest.raises(
        SettingsError, match="NVIDIA H20: 148 by its data sheet, got 989.5; give a STUDY.yaml"
    ):
        _require_peak(asked, [{"name": "NVIDIA H20"}])


def test_the_study_of_a_gpu_is_read_and_its_most_telling_cells_come_first() -> None:
    cells = cells_of(read_study(None, on_gpu=True), build=True)
    assert [Cell.named(cell.name) for cell in cells] == cells, "a name says which cell it is"
    names = [cell.name for cell in cells]
    assert names[:5] == [
        "build",
        "linear/blockwise",
        "linear/current",
        "linear/delayed",
        "linear/blockwise_pow2",
    ]
    ways = ("bf16", "blockwise", "current", "delayed")
    assert names[5:9] == [f"layers/{way}/8192" for way in ways]
    assert names[9:15] == [
        f"layers/{way}/8192/tp8" for way in (*ways, "current_mlp", "blockwise_mlp")
    ]
    lengths = dict.fromkeys(cell.tokens for cell in cells if cell.kind == "layers")
    assert list(lengths) == [8192, 16384, 4096, 32768]
    assert {cell.ranks for cell in cells if cell.tokens == 32768} == {1, 2, 4, 8}
    assert [name for name in names if name.endswith("8192/tp8/recompute")] == [
        f"layers/{w}/8192/tp8/recompute" for w in ways
    ]
    variables = {cell.way: cell.environment for cell in cells}
    assert variables["blockwise"]["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    assert variables["blockwise_pow2"]["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "0"
    assert variables["current"]["NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"] == "0"


# ---- what a GPU's cells do, with a stand-in for TransformerEngine that rounds as it does


class OnGPU(Machine):
    """A CPU that says it is one."""

    on_gpu = True


class StandIn:
    """te.Linear, ``fp8_autocast`` and the recipes of TransformerEngine 2.11, as far as the study
    uses them."""

    def __init__(self, recipe: Recipe) -> None:
        self.products, self.scales = Products(recipe), Products(recipe).scales()
        self.active, self.deaf = False, False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            engine, "linear", lambda inputs, outputs: StandInLinear(self, inputs, outputs)
        )
        modules = {"transformer_engine": ModuleType("transformer_engine")}
        modules["transformer_engine.pytorch"] = SimpleNamespace(fp8_autocast=self.autocast)
        modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]
        modules["transformer_engine.common"] = ModuleType("transformer_engine.common")
        modules["transformer_engine.common.recipe"] = self.recipes()
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    @staticmethod
    def recipes() -> SimpleNamespace:
        """Scales as the environment said when this was made, as TransformerEngine takes them at its
        import."""

        def scaling(pow2: bool) -> type:
            return type(
                "Scaling",
                (SimpleNamespace,),
                {"fp8_quant_fwd_inp": SimpleNamespace(power_2_scale=pow2)},
            )

        return SimpleNamespace(
            Format=SimpleNamespace(E4M3="e4m3", HYBRID="hybrid"),
            DelayedScaling=SimpleNamespace,
            Float8BlockScaling=scaling(os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] != "1"),
            Float8CurrentScaling=scaling(
                os.environ["NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"] == "1"
            ),
        )

    @contextmanager
    def autocast(self, enabled: bool, fp8_recipe: SimpleNamespace) -> Iterator[None]:
        self.active = enabled and not self.deaf
        yield
        self.active = False
        self.update("x", "w")

    def update(self, *names: str) -> None:
        """TransformerEngine's moments: at the end of the context, and of the backward pass for
        gradients."""
        for name in names:
            if name in self.scales:
                self.scales[name].update(self.scales[name].history_A[0].clone())

    def scale(self, name: str, operand: Tensor) -> dict[str, Tensor]:
        if name not in self.scales:
            return {}
        self.scales[name].record(operand)
        return {name: self.scales[name].scale.clone()}


class StandInLinear(torch.nn.Linear):
    def __init__(self, te: StandIn, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=torch.bfloat16)
        self.te = te

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, self.weight, self.te) if self.te.active else super().forward(x)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, te: StandIn) -> Tensor:
        ctx.te, ctx.scales = te, te.scale("x", x) | te.scale("w", w)
        ctx.save_for_backward(x, w)
        return te.products.output(x, w, ctx.scales)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        scales = ctx.scales | ctx.te.scale("dy", dy)
        dx, dw = (
            ctx.te.products.input_gradient(dy, w, scales),
            ctx.te.products.weight_gradient(dy, x, scales),
        )
        ctx.te.update("dy")
        return dx, dw.to(w.dtype), None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    def make(way: str, environment_of: str | None = None) -> StandIn:
        for name, value in Cell("linear", environment_of or way).environment.items():
            monkeypatch.setenv(name, value)
        te = StandIn(RECIPES[way])
        te.install(monkeypatch)
        return te

    return make


def kernels(*seconds: float) -> dict[str, Any]:
    parts = zip(("logprobs", "forward_backward", "optimizer"), seconds, strict=True)
    return {
        f"{part}_kernels": {
            "device_seconds": of,
            "groups": {"products": 0.75 * of, "norms": 0.25 * of},
        }
        for part, of in parts
    }


@pytest.mark.parametrize(
    ("gains", "way", "why"),
    [
        (
            {"current": 1.4, "blockwise": 1.2},
            "current",
            "1.40 on the device, 1.40 by the clock; then blockwise 1.20",
        ),
        ({"current": 0.9, "current_mlp": 1.15}, "current_mlp", "current_mlp: 1.15 on the device"),
        (
            {"current": 1.05, "blockwise": 0.8},
            "bf16",
            "none is above 1.05; current: 1.05 on the device",
        ),
        ({"delayed": float("nan")}, None, ""),
    ],
)
def test_the_recipe_to_take_is_the_fastest_that_is_worth_it(
    gains: dict[str, float], way: str | None, why: str
) -> None:
    """By the cells alone; an earlier study without times of the device recommends nothing."""
    plain = kernels(1.0, 2.0, 9.0) | {
        "logprobs_seconds": 1.0,
        "forward_backward_seconds": 2.0,
        "step_seconds": 11.0,
    }
    cells = {"layers/bf16/64/tp8": plain}
    for name, gain in gains.items():
        passes = {
            "logprobs_seconds": 1 / gain,
            "forward_backward_seconds": 2 / gain,
            "step_seconds": 9 + 2 / gain,
        }
        cells[f"layers/{name}/64/tp8"] = (
            kernels(1 / gain, 2 / gain, 9.0) | passes if way else {"logprobs_seconds": 1.0}
        )
    found = choices(
        {"cells": {name: {"status": "passed", "measured": of} for name, of in cells.items()}}
    )
    assert [(c.ranks, c.tokens, c.way) for c in found] == ([(8, 64, way)] if way else [])
    assert all(why in choice.why for choice in found), found


@pytest.mark.e2e
@pytest.mark.slow
def test_an_fp8_engine_starts_and_generates(study: Study, monkeypatch) -> None:
    monkeypatch.setattr(fp8_study, "cells_of", lambda *_, **__: [Cell("engine", "blockwise")])
    code, text = study.main("kinds: [engine]\n", "--minutes", str(PATIENCE_S / 60))
    assert code == 0 and study.statuses == {"engine/blockwise": "passed"}, text
    engine_cell = study.report["cells"]["engine/blockwise"]["measured"]
    assert engine_cell["decode_tokens_per_second"] > 0


def test_how_far_trainers_are_from_engines_by_what_the_policy_has_sampled() -> None:
    found = runs.mismatch(
        Machine(torch.device("cpu"), None, PATIENCE_S), read_study(None, on_gpu=False)
    )
    gaps = {(row["trainer"], row["rollout"]): row["k3_rollout"] for row in found["cells"]}
    assert len(gaps) == 8 and gaps["fp32", "fp32"] == 0.0 < gaps["fp32", "blockwise"]


def test_a_run_is_asked_for_what_its_name_says() -> None:
    """The runs themselves are cells of benchmarks/results/fp8_study_cpu.json."""
    cpu, settings = (
        Machine(torch.device("cpu"), None, PATIENCE_S),
        read_study(None, on_gpu=True)["run"],
    )
    words = " ".join(runs._options(cpu, "current_mlp", Path("folder"), settings))
    assert "--fp8.enable true --fp8.recipe current --fp8.modules mlp --fp8.emulate true" in words
    words = " ".join(runs._options(CPU, "delayed", Path("folder"), settings))
    assert "--fp8.recipe delayed --train.colocate_all true" in words and "emulate" not in words


def test_the_page_of_a_gpu(tmp_path: Path) -> None:
    """Numbers that are made up: each has a place of its own on the page."""
    errors = {"y": 1e-4, "dx": 2e-4, "dw": 3e-4}
    linear_row = {
        "micro_batch": 0,
        "emulation_against_exact": errors,
        "emulation_against_peer": errors,
    }
    product = {
        "name": "qkv",
        "ranks": 8,
        "inputs": 5120,
        "outputs": 896,
        "forward_seconds": 1e-3,
        "backward_seconds": 2e-3,
        "step_seconds": 3e-3,
        "bf16_step_seconds": 4.5e-3,
        "tflops": 1001,
        "bf16_tflops": 667,
        "ratio": 1.5,
    }
    layers = {
        "recipe": "none",
        "loss": 10.0,
        "gradient_norm": 2.0,
        "logprobs": [-9.0, -10.0],
        "train_tokens_per_second": 3333,
        "step_tokens_per_second": 3000,
        "logprobs_tokens_per_second": 9999,
        "train_tflops": 500.0,
        "logprobs_tflops": 510.0,
        "train_mfu_bf16": 0.505,
        "train_mfu_fp8": 0.2525,
        "logprobs_mfu_bf16": 0.515,
        "logprobs_mfu_fp8": 0.2575,
        "step_allocated_bytes": 77 * 2**30,
        "step_reserved_bytes": 88 * 2**30,
    }
    layers |= kernels(6e-3, 12e-3, 2e-3) | {
        "logprobs_seconds": 7e-3,
        "forward_backward_seconds": 13e-3,
        "step_seconds": 16e-3,
    }
    fp8 = (
        layers
        | kernels(4e-3, 8e-3, 2e-3)
        | {
            "recipe": "blockwise e4m3 fp32",
            "loss": 10.01,
            "logprobs": [-9.5, -10.0],
            "gradient_norm": 2.02,
        }
    )
    cells = {
        "linear/blockwise": {"peer": "te.Linear", "bound": 7e-3, "micro_batches": [linear_row]},
        "products/blockwise": {"what": "te.Linear", "rows": [product], "ratio_of_sums": 1.41},
        "layers/bf16/4096": layers,
        "layers/blockwise/4096": fp8,
        "engine/blockwise": {
            "start_seconds": 31.5,
            "first_batch_seconds": 12.25,
        },
        "mismatch/emulated": {
            "cells": [
                {"trainer": way, "rollout": "blockwise", "k3_rollout": gap, "mean_abs": 0.1}
                for way, gap in (("bf16", 4e-3), ("blockwise", 1e-3))
            ]
        },
        "run/none": {
            "label": "",
            "last_step_seconds": {"step": 9.5, "train": 4.5},
            "kl/rollout": 7e-4,
            "mismatch/mean_abs": 3e-2,
        },
    }
    spans = dict.fromkeys(
        ("sm_mhz", "memory_mhz", "watts", "celsius"),
        {"min": 1500.0, "median": 1777.0, "max": 1980.0},
    )
    gpu = {"samples": 9, "busy_samples": 7, **spans}
    machine = {
        "gpus": [{"name": "NVIDIA H200", "power.limit": "700.00 W"}],
        "cpu": "a CPU",
        "cores": 16,
    }
    report = {
        "started": "today",
        "emulated": False,
        "hardware": machine,
        "versions": {"torch": "2.11.0", "ray": None},
        "commit": {"commit": "abc", "dirty": False},
        "settings": read_study(None, on_gpu=True),
        "cells": {
            name: {"status": "passed", "measured": found, "gpu": gpu}
            for name, found in cells.items()
        }
        | {
            "layers/delayed/4096": {
                "status": "failed",
                "error": "Traceback\nOutOfMemoryError: a | b",
            }
        },
    }
    assert write_report(tmp_path, report) == tmp_path / "study.md"
    page = (tmp_path / "study.md").read_text()
    for said in (
        "Measured on **GPU: NVIDIA H200**",
        "power.limit 700.00 W",
        "| blockwise | 1.41 | 1.40 |",
        "| 1.50 |",
        "| 50.5% | 25.2% |",
        "| 77.0 | 88.0 |",
        "| +1.00e-03 |",
        "| +1.00e-02 | 2.50e-01 |",
        "H200 NVL",
        "989.5 (BF16), 1979.0 (FP8)",
        "| 1 | 4096 | **blockwise** | blockwise: 1.50 on the device, 1.00 by the clock; the "
        "host cannot keep up with",
        "| blockwise | 4096 | 1 | - | 23.000 | 14.000 | 30% | 57% | 13% | products 75%, norms "
        "25% | 1.50 | 1.00 |",
        "Closest to FP8 engines, emulated: blockwise (kl/rollout 1.00e-03)",
        "| blockwise | 31.5 | 12.25 | - | - | - |",
        "| none | 9.5 | - | - | 4.5 | - | 7.00e-04 | 3.00e-02 |",
        "| layers/bf16/4096 | 7 | 1500 / 1777 / 1980 |",
        "| layers/delayed/4096 | failed | OutOfMemoryError: a / b |",
    ):
        assert said in page, f"{said}\n{page}"
    assert page.startswith("# FP8 study\n") and "EMULATED, on a CPU" not in page


CPU = OnGPU(torch.device("cpu"), None, PATIENCE_S)
LAYER = {
    "tokens": 128,
    "inputs": 256,
    "outputs": 128,
    "micro_batches": 3,
    "bound": 2e-3,
    "bound_of_fp32_blocks": 7e-3,
}
PRODUCTS = {
    "tokens": 128,
    "tensor_parallel": [1],
    "repeats": 1,
    "columns": {"qkv": [128, 256]},
    "rows": {},
}


@pytest.mark.parametrize("way", RECIPES)
def test_the_engines_layer_is_held_against_the_emulation_micro_batch_by_micro_batch(
    stand_in, way: str
) -> None:
    stand_in(way)
    found = linear.measure(CPU, RECIPES[way], LAYER)
    assert found["peer"] == "te.Linear" and len(found["micro_batches"]) == 3
    assert found["worst_against_peer"] < 1e-6, "the same rounding with the same scales"


def test_an_engine_that_rounds_otherwise_or_not_at_all_fails(stand_in) -> None:
    te = stand_in("current")
    te.products = Products(RECIPES["blockwise"])
    with pytest.raises(
        Partly, match="te.Linear is .* away from the emulation, at most 0.002 is allowed"
    ) as caught:
        linear.measure(CPU, RECIPES["current"], LAYER)
    assert caught.value.measured["worst_against_peer"] > 0.01
    te.deaf = True
    with pytest.raises(Partly):
        linear.measure(CPU, RECIPES["current"], LAYER)
    with pytest.raises(AssertionError, match="or FP8 is not active"):
        products.recipes(CPU, RECIPES["current"], PRODUCTS)


def test_an_engine_that_was_imported_with_other_scales_is_refused(stand_in) -> None:
    stand_in("blockwise", environment_of="blockwise_pow2")
    with pytest.raises(RuntimeError, match="was imported with power_2_scale True"):
        linear.measure(CPU, RECIPES["blockwise"], LAYER)


@pytest.mark.parametrize("way", ["blockwise", "delayed"])
def test_the_engines_products_are_timed_beside_bf16(stand_in, way: str) -> None:
    stand_in(way)
    found = products.recipes(CPU, RECIPES[way], PRODUCTS)
    (row,) = found["rows"]
    assert (row["inputs"], row["outputs"]) == (128, 256) and 0.02 < row["relative_to_bf16"] < 0.06
    assert row["ratio"] == pytest.approx(row["bf16_step_seconds"] / row["step_seconds"])
    assert row["tflops"] == pytest.approx(3 * 2 * 128 * 128 * 256 / row["step_seconds"] / 1e12)
