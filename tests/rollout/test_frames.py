"""Memory of frames is used again, but never under a tensor that is still there."""

from __future__ import annotations

from openrlhf_ext.rollout.sync.frames import FramePool


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
