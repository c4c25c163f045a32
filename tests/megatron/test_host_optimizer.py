"""Adam's states in host memory: blocks cut anywhere are Adam in one piece; layouts are in
test_overlap, checkpoints in test_checkpoint, sleep in test_offload."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.megatron.step import host_optimizer
from openrlhf_ext.megatron.step.host_optimizer import MASTER, HostOptimizer


def shards(sizes: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Parts of one buffer, as Megatron's are."""
    buffer = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(3)).to(dtype)
    return [part.detach() for part in buffer.split(list(sizes))]


def adam(groups: Sequence[Sequence[torch.Tensor]]) -> torch.optim.AdamW:
    """Groups with settings of their own."""
    return torch.optim.AdamW(
        [
            {
                "params": [p.requires_grad_() for p in group],
                "lr": 0.1 / (n + 1),
                "weight_decay": 0.1 * n,
            }
            for n, group in enumerate(groups)
        ]
    )


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 40), max_size=4), min_size=1, max_size=3),
    block=st.integers(1, 50),
    dtypes=st.lists(st.sampled_from([torch.bfloat16, torch.float32]), min_size=3, max_size=3),
)
def test_blocks_cut_anywhere_are_adam_in_one_piece(sizes, block, dtypes):
    ours = [shards(group, dtype) for group, dtype in zip(sizes, dtypes, strict=False)]
    theirs = [[p.float().clone() for p in group] for group in ours]
    inner, whole = torch.optim.AdamW([torch.zeros(1)]), adam(theirs)
    inner.param_groups = [
        {**group, "params": mine} for group, mine in zip(whole.param_groups, ours, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_optimizer, "_BLOCK", block)
        passing = HostOptimizer(inner)
        for step in range(1, 4):
            for mine, wanted in zip(ours, theirs, strict=True):
                for shard, main in zip(mine, wanted, strict=True):
                    main.grad = torch.randn(
                        len(main), generator=torch.Generator().manual_seed(step)
                    )
                    shard.decoupled_grad = main.grad.clone()
            passing.step()
            whole.step()
            assert {group["step"] for group in passing.param_groups} == {step}
    assert passing.take_seconds() > 0 and passing.take_seconds() == 0
    for shard, main in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        held = passing.tensors(shard)
        assert torch.equal(shard, main.detach().to(shard.dtype))
        assert (MASTER in held) == (shard.dtype == torch.bfloat16)
        assert torch.equal(held.get(MASTER, shard), main.detach())
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[name], whole.state[main][name]), name


def test_host_memory_that_is_not_there_is_an_error_with_the_rank_and_the_option(monkeypatch):
    def refused(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    inner = torch.optim.AdamW([torch.zeros(1 << 20)])
    monkeypatch.setattr(host_optimizer.torch, "zeros", refused)
    said = (
        "rank 0: 0.0 GiB of host memory for Adam's states (ds.adam_offload) cannot be had: "
        "DefaultCPUAllocator"
    )
    with pytest.raises(MemoryError, match=re.escape(said)):
        HostOptimizer(inner)
