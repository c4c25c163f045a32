from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.head.kernels import Precision, TorchKernels
from openrlhf_ext.head.passes import tile_costs
from openrlhf_ext.head.rows import TileCosts, one_pass_plan, tile_plan

COSTS = st.builds(
    TileCosts,
    logit=st.integers(4, 16),
    kept=st.sampled_from([4, 8]),
    token=st.integers(0, 200_000),
    column=st.integers(0, 40_000),
    part=st.sampled_from([16, 32]),
)


@given(
    tokens=st.integers(1, 100_000),
    rows=st.integers(1, 300_000),
    costs=COSTS,
    workspace=st.integers(1 << 20, 1 << 30),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_tiles_fit_the_workspace_and_cover_everything(tokens, rows, costs, workspace, device):
    plan = tile_plan(tokens, rows, costs, workspace, device)
    used = (
        plan.tokens * plan.columns * costs.logit
        + plan.tokens * costs.token
        + plan.columns * costs.column
    )
    smallest = 16 * 128 * costs.logit + 16 * costs.token + 128 * costs.column
    assert used <= max(workspace, smallest)
    assert 1 <= plan.tokens <= tokens and 1 <= plan.columns <= rows
    covered = [index for part in plan.slices(rows) for index in (part.start, part.stop)]
    assert covered[0] == 0 and covered[-1] == rows and covered[1:-1:2] == covered[2::2]


@given(
    tokens=st.integers(1, 100_000),
    rows=st.integers(1, 300_000),
    costs=COSTS,
    workspace=st.integers(1, 1 << 30),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_one_pass_keeps_a_block_within_the_workspace_or_declines(
    tokens, rows, costs, workspace, device
):
    plan = one_pass_plan(tokens, rows, costs, workspace, device, force=False)
    if plan is not None:
        slices = len(plan.slices(rows))
        used = plan.tokens * (
            rows * costs.kept + plan.columns * costs.logit + costs.token + slices * costs.part
        )
        assert used + plan.columns * costs.column <= workspace
        blocks = -(-tokens // plan.tokens)
        # blocks of one size, to a token each
        assert plan.keeps and plan.tokens * blocks - tokens < blocks
    assert one_pass_plan(tokens, rows, costs, workspace, device, force=True).tokens >= 1


def test_default_workspace_and_the_shapes_it_is_for():
    """256 MiB keep a block of a 151,936-token vocabulary on a CPU; a GPU would want larger blocks,
    or a shard."""
    costs = TileCosts(logit=8, kept=4, token=3 * 4096, column=0)
    assert one_pass_plan(4096, 151_936, costs, 256 << 20, "cpu", force=False).tokens >= 400
    assert one_pass_plan(4096, 151_936, costs, 256 << 20, "cuda", force=False) is None
    assert one_pass_plan(4096, 151_936 // 8, costs, 256 << 20, "cuda", force=False).tokens >= 1024


@pytest.mark.parametrize(
    ("dtype", "device", "copies"),
    [
        (torch.float32, "cuda", 0),
        (torch.bfloat16, "cuda", 0),
        (torch.float16, "cuda", 4),  # d logits are fp32, and so are the operands of their products
        (torch.float32, "cpu", 0),
        (torch.bfloat16, "cpu", 4),
    ],
)
def test_copies_of_operands_in_another_format_are_charged(dtype, device, copies):
    """Bytes for each number of a row of the weight, and of a hidden state beside its gradients."""
    precision = Precision.of(dtype, torch.device(device))
    costs = [
        tile_costs(hidden, dtype, precision, TorchKernels(), gradients=True)
        for hidden in (1000, 2000)
    ]
    assert costs[0].column == copies * 1000
    gradients, operand = 2 * 4, 4 if device == "cpu" or dtype == torch.float32 else 0
    right = 4 if (dtype, device) == (torch.float16, "cuda") else 0
    assert costs[1].token - costs[0].token == 1000 * (gradients + operand + right)


def test_a_rank_that_holds_most_of_a_sequence_makes_smaller_blocks():
    """It pads what all others send, and what they get back."""
    precision = Precision.of(torch.bfloat16, torch.device("cuda"))

    def tokens(gathered: float) -> int:
        costs = tile_costs(
            5120, torch.bfloat16, precision, TorchKernels(), gradients=True, gathered=gathered
        )
        plan = tile_plan(8192, 152_064 // 8, costs, 256 << 20, "cuda")
        assert plan.tokens * gathered * 5120 * (2 + 4) < 256 << 20
        return plan.tokens

    assert 16 < tokens(9.0) < tokens(1.125)
