"""What a failed run says about its processes."""

from __future__ import annotations

import socket
import subprocess
import sys

from ray.exceptions import RayTaskError

from openrlhf_ext.driver.session import RaySession
from openrlhf_ext.driver.waiting import DeadlineExceeded
from openrlhf_ext.rewards import RewardFailureLimit
from openrlhf_ext.rollout.process import own_identity
from tests.megatron.test_phases import monitors
from tests.patience import PATIENCE_S


def test_a_deadline_of_the_driver_tells_what_every_rank_is_doing() -> None:
    session = RaySession(policy_ranks=2, engines=1, env={}, verbose=False)
    with monitors(2) as made, made[1].phase("training"):
        session.watch("policy", made[0].addresses)
        text = session.describe_failure(DeadlineExceeded("waited 9 s while training step 3"))
        other = session.describe_failure(ValueError("no"))
    first, group, suspects, *_ = text.splitlines()
    assert first == "DeadlineExceeded: waited 9 s while training step 3"
    assert group == "--- ranks of the policy" and suspects == "Not arrived: rank 0."
    assert "rank 0: has entered no phase yet" in text and "rank 1: in 'training' for" in text
    assert other == "ValueError: no"


def test_a_reward_function_that_fails_is_shown_without_our_own_frames() -> None:
    session = RaySession(policy_ranks=1, engines=1, env={}, verbose=False)
    failed = RewardFailureLimit("11 samples could not be graded. The last failure: ValueError: my bug")
    text = session.describe_failure(RayTaskError("generate", "Traceback: executor.py, pool.py", failed))
    assert text == f"RewardFailureLimit: {failed}"


def test_a_death_is_named_whoever_reports_it() -> None:
    """A rank that waited for a dead engine raises first: the report still names the engine."""
    session = RaySession(policy_ranks=1, engines=1, env={}, verbose=False)
    engine = subprocess.Popen([sys.executable, "-c", "pass"])
    session.remember("rollout engine 0", {**own_identity(), "pid": engine.pid})
    session.remember("policy rank 0", own_identity())
    engine.wait(PATIENCE_S)
    waited = RayTaskError("sync", "Traceback: engine 0 failed while receiving weights", RuntimeError("engine 0 failed"))
    text = session.describe_failure(waited)
    assert "engine 0 failed while receiving weights" in text
    assert f"dead processes: rollout engine 0 (pid {engine.pid} on {socket.gethostname()})" in text
