from __future__ import annotations

import threading
import time

import pytest

from openrlhf_ext.controller.rollout_queue import EngineTurns, RolloutQueue, Stopped

WAIT_S = 10


class Maker(threading.Thread):
    """Makes ``count`` numbered batches; ``started`` says how many it has begun."""

    def __init__(self, queue: RolloutQueue, count: int, empty: tuple[int, ...] = ()) -> None:
        super().__init__(daemon=True)
        self.queue, self.count, self.empty = queue, count, empty
        self.started, self.stopped = 0, False

    def run(self) -> None:
        try:
            for number in range(self.count):
                self.queue.reserve()
                self.started += 1
                if number in self.empty:
                    self.queue.give_back()
                else:
                    self.queue.put(number)
            self.queue.finish()
        except Stopped:
            self.stopped = True


def until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_batch_arrives_once_in_order_and_at_most_size_are_ahead(size):
    queue: RolloutQueue[int] = RolloutQueue(size)
    maker = Maker(queue, 12)
    maker.start()
    taken = []
    for number in range(12):
        until(lambda: maker.started == min(12, len(taken) + size))
        time.sleep(0.01)
        assert maker.started == min(12, len(taken) + size), "one too many was begun"
        taken.append(queue.take(maker.is_alive))
        assert taken[-1] == number
    assert queue.take(maker.is_alive) is None


def test_a_batch_that_came_to_nothing_keeps_no_place():
    queue: RolloutQueue[int] = RolloutQueue(1)
    maker = Maker(queue, 5, empty=(0, 1, 3))
    maker.start()
    assert [queue.take(maker.is_alive) for _ in range(3)] == [2, 4, None]


def test_a_maker_that_waits_for_a_place_can_be_stopped():
    queue: RolloutQueue[int] = RolloutQueue(1)
    maker = Maker(queue, 9)
    maker.start()
    until(lambda: len(queue) == 1)
    queue.stop()
    maker.join(WAIT_S)
    assert maker.stopped and maker.started == 1


def test_a_maker_that_vanished_is_noticed():
    queue: RolloutQueue[int] = RolloutQueue(1)
    with pytest.raises(RuntimeError, match="ended without saying why"):
        queue.take(lambda: False)


def test_the_size_is_at_least_one():
    with pytest.raises(ValueError, match="train.async_queue_size must be at least 1, got 0"):
        RolloutQueue(0)


def test_a_waiting_sync_goes_before_the_next_rollouts_and_never_meets_any():
    turns, log, at_work = EngineTurns(), [], []

    def use(name: str, context) -> None:
        with context:
            at_work.append(name)
            assert len(at_work) == 1, at_work
            log.append(name)
            time.sleep(0.01)
            at_work.remove(name)

    def generate() -> None:
        for _ in range(6):
            use("rollouts", turns.generating())

    maker = threading.Thread(target=generate, daemon=True)
    maker.start()
    for _ in range(3):
        until(lambda: "rollouts" in at_work)
        begun = len(log)
        use("sync", turns.syncing())
        assert log[begun] == "sync", "rollouts began although a sync was waiting"
    maker.join(WAIT_S)
    assert log.count("rollouts") == 6 and log.count("sync") == 3


def test_rollouts_go_on_after_a_sync_that_failed():
    turns = EngineTurns()
    with pytest.raises(ZeroDivisionError), turns.syncing():
        raise ZeroDivisionError
    with turns.generating():
        pass


def test_stopped_turns_refuse_rollouts():
    turns = EngineTurns()
    turns.stop()
    with pytest.raises(Stopped), turns.generating():
        pass
