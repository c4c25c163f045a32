from __future__ import annotations

import threading
import time

import pytest

from openrlhf_ext.controller.rollout_queue import EngineTurns, RolloutQueue, Stopped
from tests.patience import PATIENCE_S, until


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


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_batch_arrives_once_in_order_and_at_most_size_are_ahead(size):
    queue: RolloutQueue[int] = RolloutQueue(size)
    maker = Maker(queue, 12)
    maker.start()
    taken = []
    for number in range(12):
        until(lambda: maker.started == min(12, len(taken) + size), "the maker begins what has a place")
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
    until(lambda: len(queue) == 1, "a batch waits")
    queue.stop()
    maker.join(PATIENCE_S)
    assert maker.stopped and maker.started == 1


def test_a_maker_that_vanished_is_noticed():
    queue: RolloutQueue[int] = RolloutQueue(1)
    with pytest.raises(RuntimeError, match="ended without saying why"):
        queue.take(lambda: False)


def test_the_size_is_at_least_one():
    with pytest.raises(ValueError, match="train.async_queue_size must be at least 1, got 0"):
        RolloutQueue(0)


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_waiting_sync_goes_before_the_next_rollouts():
    turns, log, may_end = EngineTurns(), [], threading.Event()

    def generate() -> None:
        for _ in range(2):
            with turns.generating():
                log.append("rollouts")
                assert may_end.wait(PATIENCE_S)
                log.append("their end")

    def synchronize() -> None:
        with turns.syncing():
            log.append("sync")

    maker = in_thread(generate)
    until(lambda: log, "rollouts are made")
    syncer = in_thread(synchronize)
    until(lambda: turns._syncing, "a sync waits")
    may_end.set()
    for thread in (maker, syncer):
        thread.join(PATIENCE_S)
    assert log == ["rollouts", "their end", "sync", "rollouts", "their end"]


def test_rollouts_and_syncs_never_meet():
    turns, at_work, met = EngineTurns(), [], []

    def use(name: str, context) -> None:
        with context:
            at_work.append(name)
            time.sleep(0.002)
            met.append(list(at_work))
            at_work.remove(name)

    def generate() -> None:
        for _ in range(30):
            use("rollouts", turns.generating())

    maker = in_thread(generate)
    for _ in range(30):
        use("sync", turns.syncing())
    maker.join(PATIENCE_S)
    assert sorted(met) == [["rollouts"]] * 30 + [["sync"]] * 30


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
