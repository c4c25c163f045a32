from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray

from openrlhf_ext.driver.waiting import Deadline, DeadlineExceeded
from tests.cluster import start_local_ray
from tests.patience import PATIENCE_S, SOONER_S


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    start_local_ray()
    yield
    ray.shutdown()


@ray.remote(num_cpus=0.1)
def after(seconds: float, result: object) -> object:
    time.sleep(seconds)
    if isinstance(result, Exception):
        raise result
    return result


def test_results_come_in_order_and_others_are_looked_after_meanwhile() -> None:
    deadline, looks = Deadline(), []
    with deadline.limit(PATIENCE_S, "training", "train.x"):
        refs = [after.remote(1.0, "slow"), after.remote(0.0, "fast")]
        assert deadline.get(refs, meanwhile=lambda: looks.append(1)) == ["slow", "fast"]
    assert len(looks) > 2


def test_a_wait_ends_and_says_what_it_was_for() -> None:
    deadline, started = Deadline(), time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"waited 0.5 s while sleeping soundly; raise --train.x"):
        with deadline.limit(0.5, "sleeping", "train.x"):
            deadline.doing = "sleeping soundly"
            deadline.get([after.remote(3600, None)])
    assert time.monotonic() - started < SOONER_S


def test_an_error_does_not_wait_for_the_others() -> None:
    deadline = Deadline()
    with deadline.limit(PATIENCE_S, "training", "train.x"), pytest.raises(ZeroDivisionError):
        deadline.get([after.remote(3600, None), after.remote(0.0, ZeroDivisionError("x"))])


def test_what_happens_meanwhile_may_fail_too() -> None:
    def fail() -> None:
        raise LookupError("the reward function failed")

    deadline = Deadline()
    with deadline.limit(PATIENCE_S, "training", "train.x"), pytest.raises(LookupError):
        deadline.get([after.remote(3600, None)], meanwhile=fail)


def test_the_clock_stands_still_while_it_is_suspended_and_then_starts_anew() -> None:
    deadline = Deadline()
    with deadline.limit(1.0, "working", "train.x"):
        time.sleep(0.5)
        with deadline.suspended():
            time.sleep(1.2)
        assert 0.9 < deadline.remaining <= 1.0
        time.sleep(1.1)
        with pytest.raises(DeadlineExceeded):
            _ = deadline.remaining
    with deadline.suspended():
        pass


def test_a_wait_without_a_deadline_is_refused() -> None:
    with pytest.raises(RuntimeError, match="outside of a phase"):
        Deadline().get([after.remote(0.0, None)])
