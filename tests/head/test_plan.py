from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from openrlhf_ext.head.plan import TileCosts, one_pass_plan, tile_plan

COSTS = st.builds(
    TileCosts, logit=st.integers(4, 16), kept=st.sampled_from([4, 8]), token=st.integers(0, 200_000),
    column=st.integers(0, 40_000),
)  # fmt: skip


@given(
    tokens=st.integers(1, 100_000), rows=st.integers(1, 300_000), costs=COSTS,
    workspace=st.integers(1 << 20, 1 << 30), device=st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
def test_tiles_fit_the_workspace_and_cover_everything(tokens, rows, costs, workspace, device):
    plan = tile_plan(tokens, rows, costs, workspace, device)
    used = plan.tokens * plan.columns * costs.logit + plan.tokens * costs.token + plan.columns * costs.column
    smallest = 16 * 128 * costs.logit + 16 * costs.token + 128 * costs.column
    assert used <= max(workspace, smallest)
    assert 1 <= plan.tokens <= tokens and 1 <= plan.columns <= rows
    covered = [index for part in plan.slices(rows) for index in (part.start, part.stop)]
    assert covered[0] == 0 and covered[-1] == rows and covered[1:-1:2] == covered[2::2]


@given(
    tokens=st.integers(1, 100_000), rows=st.integers(1, 300_000), costs=COSTS, workspace=st.integers(1, 1 << 30),
    device=st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
def test_one_pass_keeps_a_block_within_the_workspace_or_declines(tokens, rows, costs, workspace, device):
    plan = one_pass_plan(tokens, rows, costs, workspace, device, force=False)
    if plan is not None:
        used = plan.tokens * (rows * costs.kept + plan.columns * costs.logit + costs.token)
        assert used + plan.columns * costs.column <= workspace
        blocks = -(-tokens // plan.tokens)
        assert plan.keeps and plan.tokens * blocks - tokens < blocks  # blocks of one size, to a token each
    assert one_pass_plan(tokens, rows, costs, workspace, device, force=True).tokens >= 1


def test_default_workspace_and_the_shapes_it_is_for():
    """256 MiB keep a block of a 151,936-token vocabulary on a CPU; a GPU would want larger blocks, or a shard."""
    costs = TileCosts(logit=8, kept=4, token=3 * 4096, column=0)
    assert one_pass_plan(4096, 151_936, costs, 256 << 20, "cpu", force=False).tokens >= 400
    assert one_pass_plan(4096, 151_936, costs, 256 << 20, "cuda", force=False) is None
    assert one_pass_plan(4096, 151_936 // 8, costs, 256 << 20, "cuda", force=False).tokens >= 1024
