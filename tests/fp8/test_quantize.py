"""The formulas against a slow restatement in float64, torch's own casts and vLLM's two
quantizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openrlhf_ext.fp8 import quantize as formulas
from openrlhf_ext.fp8.quantize import (
    E4M3,
    E5M2,
    FP8_MAX,
    Grid,
    Products,
    Quantized,
    amax_of,
    quantize,
    saturating_cast,
    scale_from_amax,
)
from openrlhf_ext.fp8.recipe import Recipe

INF, NAN = float("inf"), float("nan")
FLT_MAX = torch.finfo(torch.float32).max
GRIDS, DTYPES = list(Grid), [E4M3, E5M2]


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


# ---- scales and saturation


@pytest.mark.parametrize(
    ("amax", "fp32", "pow2"),
    [
        (0.0, 1.0, 1.0),
        (INF, 1.0, 1.0),
        (NAN, 1.0, 1.0),
        (3.0, 448 / 3, 128.0),
        (448.0, 1.0, 1.0),
        (449.0, 448 / 449, 0.5),
        (1e-38, FLT_MAX, 2.0**127),
        (1e-45, FLT_MAX, 2.0**127),
        (FLT_MAX, 448 / FLT_MAX, 2.0**-120),
    ],
)
def test_scales_of_e4m3(amax, fp32, pow2):
    for value in (torch.tensor(amax), torch.tensor([[amax]])):
        assert scale_from_amax(value, E4M3).item() == pytest.approx(fp32, rel=1e-7)
        assert scale_from_amax(value, E4M3, pow2=True).item() == pow2
    assert scale_from_amax(torch.tensor(3.0), E5M2).item() == pytest.approx(57344 / 3, rel=1e-7)


def test_a_quotient_beyond_fp32_becomes_the_largest_value_of_the_inputs_type_within_blocks():
    tiny = torch.full((1, 128), 1e-38)
    for dtype in (torch.float32, torch.bfloat16):
        largest = torch.finfo(dtype).max
        assert quantize(tiny.to(dtype), E4M3, Grid.ROWS).scale_inv.item() == 1 / torch.tensor(
            largest
        )
        assert quantize(tiny.to(dtype), E4M3, Grid.TENSOR).scale_inv.item() == 1 / torch.tensor(
            FLT_MAX
        )


@pytest.mark.parametrize(
    ("dtype", "pairs"),
    [
        (
            E4M3,
            [
                (448, 448),
                (463.9, 448),
                (464, 448),
                (INF, 448),
                (-INF, -448),
                (2.0**-10, 0),
                (2e-3, 2.0**-9),
            ],
        ),
        (
            E5M2,
            [
                (57344, 57344),
                (61439, 57344),
                (61440, 57344),
                (INF, 57344),
                (-INF, -57344),
                (2.0**-17, 0),
            ],
        ),
    ],
)
def test_what_is_too_large_saturates(dtype, pairs):
    x, expected = torch.tensor(pairs, dtype=torch.float32).t()
    assert saturating_cast(x, dtype).float().tolist() == expected.tolist()
    assert saturating_cast(torch.tensor([NAN, -NAN]), dtype).float().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_is_torchs_cast(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)[None]
    for codes in (every, every.view(16, 16).t()):
        values = Quantized(codes, torch.tensor(1.0), Grid.TENSOR).values()
        assert torch.equal(values.nan_to_num(nan=7.0), codes.float().nan_to_num(nan=7.0))


def _relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("towards", [0.0, INF])
def test_an_ulp_of_a_blocks_scale_moves_a_product_as_far_as_two_libraries_may_differ(
    monkeypatch, towards
):
    """bf16 entries have 8 bits, FP8's 4: times a scale that is no power of two, a few lie midway,
    and its last bit decides. The study of a GPU allows 7e-3 (te.Linear was 4.5e-3 away)."""
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(512, 512, generator=generator).bfloat16()
    w_NK = (torch.randn(512, 512, generator=generator) / 512**0.5).bfloat16()
    exact_TN, products = x_TK.double() @ w_NK.double().t(), Products(Recipe("blockwise", "e4m3"))
    y_TN, codes_TK = products.output(x_TK, w_NK, {}), products.codes("x", x_TK).codes_RC

    def beside(amax: Tensor, dtype: torch.dtype, **options) -> Tensor:
        scale = scale_from_amax(amax, dtype, **options)
        # of x, not of w
        return torch.nextafter(scale, torch.tensor(towards)) if amax.shape[0] == 512 else scale

    monkeypatch.setattr(formulas, "scale_from_amax", beside)
    moved_TN, moved_TK = products.output(x_TK, w_NK, {}), products.codes("x", x_TK).codes_RC
    assert 1e-3 < (bits(moved_TK) != bits(codes_TK)).float().mean() < 5e-3
    assert 3e-3 < _relative(moved_TN, y_TN) < 7e-3
    assert _relative(moved_TN, exact_TN) == pytest.approx(_relative(y_TN, exact_TN), rel=2e-3)


# ---- every grid, against a restatement


def nearest(x: float, dtype: torch.dtype) -> float:
    """The FP8 value next to x, of two as near the one whose last bit is 0; saturated."""
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    values = [value for value in codes.tolist() if value <= FP8_MAX[dtype]]
    size = min(abs(x), FP8_MAX[dtype])
    best = min(range(len(values)), key=lambda code: (abs(values[code] - size), code % 2))
    return float(np.copysign(values[best], x))


def block_of(grid: Grid, row: int, column: int) -> tuple[int, int]:
    height, width = {
        Grid.TENSOR: (10**9, 10**9),
        Grid.ROWS: (1, 128),
        Grid.COLUMNS: (128, 1),
        Grid.TILES: (128, 128),
    }[grid]
    return row // height, column // width


SPECIAL = st.sampled_from(
    [0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-40, 1e-38, 3e38, -3e38, 448.0, 464.0, 2.0**-9, 2.0**-10]
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 127, 128, 129, 260]),
    columns=st.sampled_from([1, 3, 128, 130]),
    grid=st.sampled_from(GRIDS),
    dtype=st.sampled_from(DTYPES),
    of=st.sampled_from([torch.float32, torch.bfloat16]),
    pow2=st.booleans(),
    magnitude=st.sampled_from([0.0, 1e-42, 1e-30, 1.0, 1e4, 1e35]),
    seed=st.integers(0, 99),
    special=st.lists(st.tuples(st.integers(0, 259), st.integers(0, 129), SPECIAL), max_size=4),
    data=st.data(),
)
def test_any_matrix(rows, columns, grid, dtype, of, pow2, magnitude, seed, special, data):
    torch.manual_seed(seed)
    x_RC = torch.randn(rows, columns) * magnitude
    for row, column, value in special:
        x_RC[row % rows, column % columns] = value
    x_RC = x_RC.to(of)
    quantized = quantize(x_RC, dtype, grid, pow2=pow2)
    assert quantized.codes_RC.shape == x_RC.shape and quantized.codes_RC.dtype == dtype
    blocks: dict[tuple[int, int], list[float]] = {}
    for (row, column), value in np.ndenumerate(x_RC.float().numpy()):
        blocks.setdefault(block_of(grid, row, column), []).append(float(value))
    values, codes = quantized.values(), quantized.codes_RC.float()
    largest = FLT_MAX if grid is Grid.TENSOR else torch.finfo(of).max
    scales = {}
    for block, entries in blocks.items():
        amax = np.abs(np.float32(entries)).max()
        scales[block] = 1.0
        if np.isfinite(amax) and amax > 0:
            quotient = float(np.float32(min(FP8_MAX[dtype] / float(amax), largest)))
            scales[block] = 2.0 ** np.floor(np.log2(quotient)) if pow2 else quotient
        at = block if grid is not Grid.TENSOR else ()
        assert quantized.scale_inv[at].item() == pytest.approx(
            1 / scales[block], rel=2e-7, abs=2e-45
        )
    for _ in range(30):
        row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
        entry, code = float(x_RC[row, column]), float(codes[row, column])
        scale_inv = quantized.scale_inv[
            block_of(grid, row, column) if grid is not Grid.TENSOR else ()
        ].item()
        if np.isnan(entry):
            assert np.isnan(code) and values[row, column].isnan()
            continue
        # in fp32, as the product with the scale is rounded before it is cast
        with np.errstate(over="ignore"):
            product = np.float32(entry) * np.float32(scales[block_of(grid, row, column)])
        assert code == nearest(float(product), dtype)
        assert values[row, column].item() == np.float32(code) * np.float32(scale_inv)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("shape", [(0, 256), (0, 100), (256, 0)])
def test_no_entries(grid, shape):
    """A rank may have no tokens."""
    quantized = quantize(torch.empty(shape), E4M3, grid)
    assert quantized.codes_RC.shape == quantized.values().shape == shape
    assert amax_of(torch.empty(shape)) == 0.0


@pytest.mark.parametrize(
    ("grid", "shape"),
    [(Grid.TENSOR, ()), (Grid.ROWS, (200, 3)), (Grid.COLUMNS, (2, 300)), (Grid.TILES, (2, 3))],
)
def test_shapes_of_scales(grid, shape):
    assert quantize(torch.randn(200, 300), E4M3, grid).scale_inv.shape == shape


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_the_rows_of_the_transpose(shape, dtype):
    torch.manual_seed(0)
    x_RC = torch.randn(shape).to(dtype)
    for ours, theirs in (
        (Grid.COLUMNS, Grid.ROWS),
        (Grid.TILES, Grid.TILES),
        (Grid.TENSOR, Grid.TENSOR),
    ):
        for transpose in (x_RC.t(), x_RC.t().contiguous()):  # also of a view
            one, other = quantize(x_RC, E4M3, ours), quantize(transpose, E4M3, theirs)
            assert torch.equal(bits(one.codes_RC), bits(other.codes_RC.t().contiguous()))
            assert torch.equal(
                one.scale_inv, other.scale_inv.t() if other.scale_inv.ndim else other.scale_inv
            )
            assert torch.equal(one.values(), other.values().t())


def test_a_matrix_and_its_transpose_differ_under_blocks():
    """Each copy is rounded from the original."""
    torch.manual_seed(0)
    x_RC = torch.randn(256, 256) * torch.rand(256, 1).exp()
    assert not torch.equal(
        quantize(x_RC, E4M3, Grid.ROWS).values(), quantize(x_RC, E4M3, Grid.COLUMNS).values()
    )


@pytest.mark.parametrize("grid", GRIDS)
def test_bf16_has_the_codes_of_the_same_values_in_fp32(grid):
    torch.manual_seed(0)
    x_RC = torch.randn(200, 300).bfloat16()
    one, other = quantize(x_RC, E4M3, grid), quantize(x_RC.float(), E4M3, grid)
    assert torch.equal(bits(one.codes_RC), bits(other.codes_RC)) and torch.equal(
        one.scale_inv, other.scale_inv
    )
    assert one.values().dtype == torch.float32


def test_one_blocks_outlier_leaves_the_others_alone():
    torch.manual_seed(0)
    x_RC = torch.randn(256, 256)
    spoiled = x_RC.clone()
    spoiled[0, 0] = NAN
    for grid, untouched in ((Grid.ROWS, slice(1, 256)), (Grid.TILES, slice(128, 256))):
        one, other = quantize(x_RC, E4M3, grid).values(), quantize(spoiled, E4M3, grid).values()
        assert torch.equal(one[untouched], other[untouched]) and other[0, 0].isnan()


# ---- vLLM's

# They multiply by 1 / (amax / 448) or divide by amax / 448, we multiply by 448 / amax: what stands
# between two codes may go either way. bf16 entries often do, as amax has only 8 bits; of fp32 ones,
# about one in 10^6.
VLLM = pytest.mark.parametrize(("dtype", "differ"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-3)])


def compare(x_RC: Tensor, ours: Quantized, codes: Tensor, scale_inv: Tensor, differ: float) -> None:
    """Scales are the same but for the last bit, codes but for a share of at most ``differ`` that
    are between two."""
    torch.testing.assert_close(ours.scale_inv, scale_inv, rtol=2e-7, atol=0)
    other_RC = bits(ours.codes_RC) != bits(codes.contiguous())
    assert other_RC.float().mean() <= differ
    one, two = ours.codes_RC.double()[other_RC], codes.double()[other_RC]
    blocks = ours.scale_inv.double().repeat_interleave(128, 1)
    if ours.grid is Grid.TILES:
        blocks = blocks.repeat_interleave(128, 0)
    exact = (x_RC.double() / blocks[: x_RC.shape[0], : x_RC.shape[1]])[other_RC]
    torch.testing.assert_close(exact, (one + two) / 2, rtol=3e-7, atol=0)


def vllm_weight(w_NK: Tensor) -> tuple[Tensor, Tensor]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    return per_block_cast_to_fp8(w_NK, [128, 128], use_ue8m0=False)


@VLLM
@pytest.mark.parametrize("shape", [(256, 384), (512, 512), (200, 300)])
def test_weights_as_vllm_quantizes_them(dtype, differ, shape):
    torch.manual_seed(0)
    w_NK = (torch.randn(shape) * 0.02).to(dtype)
    with torch.compiler.set_stance("force_eager"):
        codes, scale_inv = vllm_weight(w_NK)
    compare(w_NK, quantize(w_NK, E4M3, Grid.TILES), codes, scale_inv, differ)


@pytest.mark.slow
def test_weights_as_vllm_quantizes_them_compiled():
    """As an engine does."""
    torch.manual_seed(0)
    w_NK = torch.randn(512, 512).mul(0.02).bfloat16()
    compare(w_NK, quantize(w_NK, E4M3, Grid.TILES), *vllm_weight(w_NK), 2e-3)


@VLLM
@pytest.mark.parametrize("columns", [128, 512, 300])
def test_activations_as_vllm_quantizes_them(dtype, differ, columns):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    torch.manual_seed(0)
    x_TK = torch.randn(200, columns).to(dtype)
    with set_current_vllm_config(VllmConfig()):
        codes, scale_inv = QuantFP8(False, GroupShape(1, 128), use_ue8m0=False).forward_native(x_TK)
    compare(x_TK, quantize(x_TK, E4M3, Grid.ROWS), codes, scale_inv, differ)


def test_vllm_takes_weights_below_1e_4_for_1e_4():
    """Where we differ from it: a tile of nothing larger has finer codes here."""
    w_NK = torch.full((128, 128), 1e-5)
    with torch.compiler.set_stance("force_eager"):
        assert vllm_weight(w_NK)[1].item() == pytest.approx(1e-4 / 448)
    assert quantize(w_NK, E4M3, Grid.TILES).scale_inv.item() == pytest.approx(1e-5 / 448)
