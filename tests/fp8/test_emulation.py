"""The three products and delayed scaling against the measured tables, torch's FP8 products and a
restatement."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.fp8.quantize import (
    E4M3,
    E5M2,
    FP8_MAX,
    DelayedScale,
    Grid,
    Products,
    amax_of,
    quantize,
)
from openrlhf_ext.fp8.recipe import Recipe

OPERANDS = ("x", "w", "dy")
BLOCKWISE, POW2 = Recipe(), Recipe(scales="pow2")
CURRENT, CURRENT_E4M3 = Recipe("current", "hybrid"), Recipe("current", "e4m3")
FLT_MAX = float(torch.finfo(torch.float32).max)


def delayed(length: int = 1024, **more) -> Recipe:
    return Recipe("delayed", "hybrid", amax_history_len=length, **more)


def error(got: Tensor, exact: Tensor) -> float:
    """Relative, of Frobenius norms."""
    return ((got.double() - exact.double()).norm() / exact.double().norm()).item()


def operands(tokens: int, inputs: int, outputs: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x, w, dy = (
        torch.randn(tokens, inputs),
        torch.randn(outputs, inputs) * 0.02,
        torch.randn(tokens, outputs) * 1e-4,
    )
    return dict(zip(OPERANDS, (x, w, dy), strict=True))


def products(recipe: Recipe, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw; under delayed scaling of the second micro-batch."""
    layer, scales = Products(recipe), {}
    for operand, scale in layer.scales().items():
        scale.record({"x": x, "w": w, "dy": dy}[operand])
        scale.update(scale.history_A[0].clone())
        scales[operand] = scale.scale
    return (
        layer.output(x, w, scales),
        layer.input_gradient(dy, w, scales),
        layer.weight_gradient(dy, x, scales),
    )


def exact_products(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = x.double(), w.double(), dy.double()
    return x @ w.t(), dy @ w, dy.t() @ x


# ---- the products


def test_errors_of_the_recipes():
    """As a prototype measured them apart from this code."""
    given = operands(1024, 2048, 2048)
    exact = exact_products(**given)
    for recipe, expected in {
        CURRENT: (0.0375, 0.0590, 0.0589),
        delayed(): (0.0375, 0.0590, 0.0589),
        CURRENT_E4M3: (0.0375, 0.0374, 0.0374),
        POW2: (0.0375, 0.0375, 0.0375),
        BLOCKWISE: (0.0369, 0.0369, 0.0363),
    }.items():
        errors = [error(*pair) for pair in zip(products(recipe, **given), exact, strict=True)]
        assert errors == pytest.approx(expected, abs=1e-4), recipe.label


def test_what_small_values_lose_beside_outliers():
    """Only where they are enormous does a scale for each block help."""
    torch.manual_seed(0)
    for factor, expected in {
        1: (0.0373, 0.0375, 0.0368),
        60: (0.0374, 0.0376, 0.0368),
        1000: (0.0375, 0.0375, 0.0371),
        20000: (0.0773, 0.0402, 0.0380),
    }.items():
        x, w = torch.randn(512, 1024), torch.randn(1024, 1024) * 0.02
        x[:, :2] *= factor
        for recipe, want in zip((CURRENT, POW2, BLOCKWISE), expected, strict=True):
            layer = Products(recipe)
            got = layer.codes("x", x).values()[:, 2:] @ layer.codes("w", w).values()[:, 2:].t()
            assert error(got, x[:, 2:] @ w[:, 2:].t()) == pytest.approx(want, abs=1e-4), (
                factor,
                recipe.label,
            )


@pytest.mark.parametrize("backward", ["e4m3", "hybrid"])
def test_tensorwise_products_are_torchs(backward):
    """``torch._scaled_mm`` multiplies the codes: fp32 out, and e5m2 x e4m3 for the gradients."""
    given, recipe = operands(64, 256, 128), Recipe("current", backward)
    codes = {operand: Products(recipe).codes(operand, matrix) for operand, matrix in given.items()}
    assert codes["dy"].codes_RC.dtype == (E5M2 if backward == "hybrid" else E4M3)

    def scaled_mm(one: str, other: str, transpose: tuple[bool, bool]) -> Tensor:
        a, b = (
            c.codes_RC.t() if t else c.codes_RC
            for c, t in zip((codes[one], codes[other]), transpose, strict=True)
        )
        a, b = a.contiguous(), b.t().contiguous().t()  # row-major times column-major
        scales = {"scale_a": codes[one].scale_inv, "scale_b": codes[other].scale_inv}
        return torch._scaled_mm(a, b, **scales, out_dtype=torch.float32)

    theirs = (
        scaled_mm("x", "w", (False, True)),
        scaled_mm("dy", "w", (False, False)),
        scaled_mm("dy", "x", (True, False)),
    )
    for got, expected in zip(products(recipe, **given), theirs, strict=True):
        assert error(got, expected) < 1e-6


@pytest.mark.parametrize(
    "recipe", [BLOCKWISE, POW2, CURRENT, delayed()], ids=lambda recipe: recipe.label
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(96, 256, 128), (37, 200, 150), (1, 64, 64)])
def test_the_sum_over_blocks_in_float64(recipe, dtype, sizes):
    """Block by block as the hardware sums: codes in float64, times both scales; only fp32's sums
    differ."""
    given = {operand: matrix.to(dtype) for operand, matrix in operands(*sizes).items()}
    got = products(recipe, **given)
    layer, scales = Products(recipe), {}
    for operand in layer.scales():
        scales[operand] = FP8_MAX[E5M2 if operand == "dy" else E4M3] / amax_of(given[operand])

    def codes(operand: str, transposed: bool) -> tuple[Tensor, Tensor]:
        q = layer.codes(operand, given[operand], transposed=transposed, scale=scales.get(operand))
        scale = q.scale_inv.double()
        if q.grid in (Grid.COLUMNS, Grid.TILES):
            scale = scale.repeat_interleave(128, 0)[: q.codes_RC.shape[0]]
        if q.grid in (Grid.ROWS, Grid.TILES):
            scale = scale.repeat_interleave(128, 1)[:, : q.codes_RC.shape[1]]
        return q.codes_RC.double(), scale.expand(q.codes_RC.shape)

    (x, sx), (w, sw), (dy, sdy) = (codes(operand, False) for operand in OPERANDS)
    (xt, sxt), (wt, swt), (dyt, sdyt) = (codes(operand, True) for operand in OPERANDS)
    exact = (
        torch.einsum("tk,tk,nk,nk->tn", x, sx, w, sw),
        torch.einsum("tn,tn,nk,nk->tk", dy, sdy, wt, swt),
        torch.einsum("tn,tn,tk,tk->nk", dyt, sdyt, xt, sxt),
    )
    bound = 2e-6 if dtype is torch.float32 else 4e-3
    assert [p.dtype for p in got] == [dtype, dtype, torch.float32]
    assert all(
        error(*pair) < limit
        for pair, limit in zip(zip(got, exact, strict=True), (bound, bound, 2e-6), strict=True)
    )


def test_blocks_lie_along_what_is_summed():
    """Of a matrix whose rows differ much in size, the copy for sums over rows must not share scales
    along them."""
    torch.manual_seed(0)
    x = torch.randn(256, 256)
    x *= torch.logspace(-12, 0, 256)[:, None]
    for recipe, fails in ((BLOCKWISE, False), (CURRENT, True)):
        row = Products(recipe).output(x, torch.eye(256), {})[:16]
        assert (error(row, x[:16]) > 0.5) == fails
    assert Products(BLOCKWISE).codes("x", x).grid is Grid.ROWS
    assert Products(BLOCKWISE).codes("x", x, transposed=True).grid is Grid.COLUMNS
    assert (
        Products(BLOCKWISE).codes("w", x).grid
        is Products(BLOCKWISE).codes("w", x, transposed=True).grid
        is Grid.TILES
    )


@pytest.mark.parametrize("recipe", [BLOCKWISE, CURRENT, delayed()], ids=lambda recipe: recipe.label)
def test_a_rank_without_tokens(recipe):
    w = torch.randn(128, 256)
    y, dx, dw = products(recipe, torch.empty(0, 256), w, torch.empty(0, 128))
    assert y.shape == (0, 128) and dx.shape == (0, 256) and torch.equal(dw, torch.zeros(128, 256))


@pytest.mark.parametrize("recipe", [BLOCKWISE, CURRENT, delayed()], ids=lambda recipe: recipe.label)
def test_nan_is_not_hidden(recipe):
    given = operands(8, 128, 128)
    given["x"][3, 5] = float("nan")
    y, _, dw = products(recipe, **given)
    assert y[3].isnan().all() and dw[:, 5].isnan().all()
    assert not y[:3].isnan().any() and not dw[:, :5].isnan().any()


def test_tokens_of_a_pack_meet_under_current_scaling_only():
    torch.manual_seed(0)
    x, w = torch.randn(16, 256), torch.randn(128, 256)
    x[8:] *= 50
    for recipe, alone in ((BLOCKWISE, True), (CURRENT, False)):
        layer = Products(recipe)
        codes = layer.codes("x", x).values()[:8], layer.codes("x", x[:8]).values()
        assert torch.equal(*codes) == alone
        assert (error(layer.output(x, w, {})[:8], layer.output(x[:8], w, {})) < 1e-6) == alone


# ---- why the quantizer must be the rollout's


def rms_norm(z: Tensor) -> Tensor:
    return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True))


def test_only_the_same_quantizer_lowers_the_mismatch():
    """A 4-layer MLP with its head in fp32; the rollout is blockwise with fp32 scales. Mean
    |log-prob difference|."""
    torch.manual_seed(1)
    hidden, vocab, tokens = 256, 2048, 512
    up = [torch.randn(4 * hidden, hidden) * hidden**-0.5 for _ in range(4)]
    down = [torch.randn(hidden, 4 * hidden) * (4 * hidden) ** -0.5 for _ in range(4)]
    head, x = torch.randn(vocab, hidden) * hidden**-0.5 * 3, torch.randn(tokens, hidden)

    def log_probs(linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        z = x
        for a, b in zip(up, down, strict=True):
            z = z + linear(F.silu(linear(rms_norm(z), a)), b)
        return torch.log_softmax(rms_norm(z) @ head.t(), -1)

    def emulated(recipe: Recipe) -> Tensor:
        return log_probs(lambda z, w: Products(recipe).output(z, w, {}))

    rollout = emulated(BLOCKWISE)
    sampled = torch.multinomial(rollout.exp(), 1)

    def mismatch(trainer: Tensor) -> float:
        return (trainer - rollout).gather(1, sampled).abs().mean().item()

    assert mismatch(emulated(Recipe())) == 0.0
    plain = mismatch(log_probs(lambda z, w: z @ w.t()))
    assert plain == pytest.approx(0.105, abs=2e-3)
    for recipe in (CURRENT, POW2):
        assert mismatch(emulated(recipe)) == pytest.approx(0.152, abs=2e-3)


# ---- delayed scaling


def run(
    recipe: Recipe, series: list[float], dtype: torch.dtype = E4M3
) -> tuple[DelayedScale, list[float]]:
    scale, seen = DelayedScale(dtype, recipe), []
    for amax in series:
        scale.record(torch.tensor([amax, 0.0]))
        scale.update(scale.history_A[0].clone())
        seen.append(scale.scale.item())
    return scale, seen


def test_a_falling_series():
    """An amax acts for exactly as many updates as the history is long."""
    series = [1, 8, 2, 0.5, 0.25, 0.125, 0.0625]
    assert run(delayed(4), series)[1] == [448, 56, 56, 56, 56, 224, 896]
    assert run(delayed(1), series)[1] == [448 / a for a in series]
    assert run(delayed(4, amax_compute_algo="most_recent"), series)[1] == [448 / a for a in series]
    assert run(delayed(4, margin=1), [2.0])[1] == [112]
    assert run(delayed(4), [2.0], E5M2)[1] == [28672]


def test_the_history_is_in_the_order_of_transformer_engine():
    scale, _ = run(delayed(4), [1, 8, 2])
    assert scale.history_A.tolist() == [0, 1, 8, 2], "the first collects, the last is the newest"
    scale.record(torch.tensor([0.5]))
    scale.record(torch.tensor([-0.75]))
    scale.record(torch.tensor([0.25]))
    assert scale.history_A.tolist() == [0.75, 1, 8, 2], "the largest of a micro-batch's tensors"
    scale.update(torch.tensor(3.0))  # another rank's was larger
    assert scale.history_A.tolist() == [0, 8, 2, 3]


@pytest.mark.parametrize("useless", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_what_is_no_size_keeps_the_scale(useless, algorithm):
    recipe = delayed(2, amax_compute_algo=algorithm)
    assert run(recipe, [2.0, useless])[1] == [224, 224]
    assert run(recipe, [useless])[1] == [1.0]
    after = run(recipe, [2.0, useless, 4.0, 4.0, 4.0])[1]
    assert after[-1] == 112, "and is forgotten"


def test_nothing_noted_moves_nothing():
    scale, _ = run(delayed(4), [1, 8, 2])
    before = scale.history_A.clone()
    scale.record(torch.empty(0, 5))
    scale.update(torch.zeros(()))
    assert torch.equal(scale.history_A, before) and scale.scale == 56


def test_nan_does_not_stay_in_the_history():
    """TransformerEngine takes fmaxf; with torch.maximum the scale would stand still for as long as
    the history is."""
    assert run(delayed(1024), [float("nan"), 2.0])[1] == [1.0, 224.0]


def test_an_overflowing_quotient():
    assert run(delayed(2), [1e-38])[1] == [FLT_MAX]
    assert run(delayed(2, margin=10), [1e-37])[1] == [np.float32(448 / 1024) / np.float32(1e-37)], (
        "margin first"
    )


@settings(max_examples=100, deadline=None)
@given(
    series=st.lists(
        st.floats(0, 2.0**100, width=32)
        | st.sampled_from([0.0, float("inf"), 1e-45, 1e-38, FLT_MAX]),
        max_size=12,
    ),
    length=st.integers(1, 5),
    margin=st.integers(0, 3),
    algorithm=st.sampled_from(["max", "most_recent"]),
)
def test_any_series(series, length, margin, algorithm):
    """TransformerEngine's kernel, step by step in float64."""
    history, scale, expected = [0.0] * length, 1.0, []
    for amax in map(float, map(np.float32, series)):
        if amax != 0.0:
            rolled = [*history[1:], amax]
            chosen = max(rolled) if algorithm == "max" else amax
            history = [0.0, *rolled[1:]]
            if np.isfinite(chosen):
                scale = min(FP8_MAX[E4M3] / 2**margin / chosen, FLT_MAX)
        expected.append(scale)
    recipe = delayed(length, margin=margin, amax_compute_algo=algorithm)
    state, seen = run(recipe, series)
    assert seen == pytest.approx(expected, rel=2e-7, abs=2e-45)
    assert state.history_A.tolist() == history


def test_the_first_micro_batch_is_clipped():
    """It runs at scale 1: the largest entries are in the thousands."""
    torch.manual_seed(0)
    x = torch.randn(256, 512) * 50
    x[:, :2] *= 30
    scale = DelayedScale(E4M3, delayed())
    errors = []
    for _ in range(2):
        errors.append(error(quantize(x, E4M3, Grid.TENSOR, scale=scale.scale).values(), x))
        scale.record(x)
        scale.update(amax_of(x))
    assert 0.68 < errors[0] < 0.70 and 0.026 < errors[1] < 0.0275


def test_only_delayed_scaling_has_scales():
    assert Products(BLOCKWISE).scales() == Products(CURRENT).scales() == {}
    scales = Products(delayed(8)).scales()
    assert {operand: scale.dtype for operand, scale in scales.items()} == {
        "x": E4M3,
        "w": E4M3,
        "dy": E5M2,
    }
    assert all(len(scale.history_A) == 8 and scale.scale == 1 for scale in scales.values())
