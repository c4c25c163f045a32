"""Host memory: frames use it again, but never under a tensor that is still there; processes share
it."""

from __future__ import annotations

import pytest

from openrlhf_ext.rollout.sync.base import FramePool
from openrlhf_ext.rollout.sync.gloo import HostMemory


def test_memory_is_lent_again_when_the_last_tensor_on_it_is_gone() -> None:
    pool = FramePool()
    frame = pool.take(100)
    view = frame[10:20].view(5, 2)
    place = frame.data_ptr()
    del frame
    other = pool.take(100)
    assert other.data_ptr() != place, "a view of the first frame is left"
    view.fill_(7)
    other.fill_(1)
    assert int(view.sum()) == 70
    del view
    again = pool.take(60)
    assert again.data_ptr() == place and len(again) == 60
    assert len(pool._blocks) == 2


def test_blocks_that_are_too_small_are_replaced() -> None:
    pool = FramePool()
    pool.take(10)
    frame = pool.take(1000)
    assert len(frame) == 1000 and len(pool._blocks) == 1


def test_memory_of_another_host_or_of_a_process_that_has_closed_it_cannot_be_opened() -> None:
    memory = HostMemory.create(100)
    memory.tensor[3] = 7
    assert HostMemory.open(memory.handle).tensor[3] == 7
    memory.close()
    with pytest.raises(OSError):
        HostMemory.open(memory.handle)
    with pytest.raises(OSError, match="on another machine"):
        HostMemory.open("elsewhere:1:2")
