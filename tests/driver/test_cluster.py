"""Starting Ray, and what a failed run says about its processes."""

from __future__ import annotations

import runpy
import socket
import subprocess
import sys
import traceback

import pytest
from ray.exceptions import RayTaskError

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.driver import cluster
from openrlhf_ext.driver.cluster import MixedCluster, RaySession, start_with_retries
from openrlhf_ext.driver.waits import DeadlineExceeded
from openrlhf_ext.rewards.grading import RewardFailureLimit
from openrlhf_ext.rollout.process import own_identity
from tests.groups.test_watchdog import monitors
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
    failed = RewardFailureLimit(
        "11 samples could not be graded. The last failure: ValueError: my bug"
    )
    text = session.describe_failure(
        RayTaskError("generate", "Traceback: executor.py, pool.py", failed)
    )
    assert text == f"RewardFailureLimit: {failed}"


def test_a_full_disk_is_said_without_frames() -> None:
    session = RaySession(policy_ranks=1, engines=1, env={}, verbose=False)
    said = "cannot write /c/model.safetensors after 8 bytes: [Errno 27] File too large"
    with pytest.raises(CheckpointError) as raised:
        raise CheckpointError(said) from OSError(27, "File too large")
    error = _remote(raised.value.with_traceback(None))  # whose frames are none of the user's
    assert session.describe_failure(error) == f"CheckpointError: {said}"


def test_an_error_in_a_users_file_is_shown_by_its_own_lines(tmp_path) -> None:
    """In the driver as in a rank, whose traceback comes as Ray's text: neither libraries nor this
    package."""
    own = tmp_path / "own.py"
    own.write_text("import json\n\ndef advantages(text):\n    return json.loads(text)\n")
    module = runpy.run_path(str(own))
    session = RaySession(policy_ranks=1, engines=1, env={}, verbose=False)
    with pytest.raises(ValueError, match="Expecting value") as raised:
        module["advantages"]("x")
    here = raised.value.__traceback__.tb_next  # without this test's own frame
    shown = f'  File "{own}", line 4, in advantages\n    return json.loads(text)'
    for error in (raised.value.with_traceback(here), _remote(raised.value)):
        text = session.describe_failure(error)
        assert shown in text and text.endswith("Expecting value: line 1 column 1 (char 0)"), text
        assert "decoder.py" not in text and "Traceback" not in text


def _remote(error: Exception) -> RayTaskError:
    return RayTaskError("fit", "".join(traceback.format_exception(error)), error)


def test_a_death_is_named_whoever_reports_it() -> None:
    """A rank that waited for a dead engine raises first: the report still names the engine."""
    session = RaySession(policy_ranks=1, engines=1, env={}, verbose=False)
    engine = subprocess.Popen([sys.executable, "-c", "pass"])
    session.remember("rollout engine 0", {**own_identity(), "pid": engine.pid})
    session.remember("policy rank 0", own_identity())
    engine.wait(PATIENCE_S)
    waited = RayTaskError(
        "sync",
        "Traceback: engine 0 failed while receiving weights",
        RuntimeError("engine 0 failed"),
    )
    text = session.describe_failure(waited)
    assert "engine 0 failed while receiving weights" in text
    assert f"dead processes: rollout engine 0 (pid {engine.pid} on {socket.gethostname()})" in text


class Starts:
    """Fails with the given messages, one after the other, and then starts."""

    def __init__(self, *failures: str) -> None:
        self.failures, self.calls = list(failures), 0

    def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise Exception(self.failures.pop(0))
        return "started"


def test_a_node_that_ray_gave_up_too_early_is_started_again(caplog):
    start = Starts(
        "The current node timed out during startup.", "The current node timed out during startup."
    )
    assert start_with_retries(start) == "started" and start.calls == 3
    assert "trying again, 3 tries are left" in caplog.text


def test_other_errors_are_not_repeated_and_tries_end():
    start = Starts("no such option", "")
    with pytest.raises(Exception, match="no such option"):
        start_with_retries(start)
    assert start.calls == 1
    start = Starts(*["The current node timed out during startup."] * 9)
    with pytest.raises(Exception, match="timed out during startup"):
        start_with_retries(start)
    assert start.calls == 5


@pytest.fixture
def joined(monkeypatch):
    """A session on a cluster whose nodes give these answers."""
    monkeypatch.setenv("RAY_ADDRESS", "n1:6379")
    monkeypatch.setattr(
        cluster, "living_nodes", lambda: [{"Resources": {"GPU": 1.0}}, {"Resources": {"CPU": 8.0}}]
    )

    def session(answers: dict) -> RaySession:
        def ask(question, nodes, timeout_s):
            assert question is cluster.count_gpus and len(nodes) == 1, (
                "nodes that Ray places ranks on are asked"
            )
            return answers

        monkeypatch.setattr(cluster, "ask_nodes", ask)
        made = RaySession(policy_ranks=2, engines=1, env={}, verbose=False)
        made.find_gpus(3.0)
        return made

    return session


def test_what_a_cluster_counts_as_gpus_are_gpus_if_its_nodes_say_so(joined):
    assert joined({"n1": 8, "n2": 8}).use_gpu is True
    assert joined({"n1": 0, "n2": 0}).use_gpu is False


def test_a_cluster_of_both_kinds_is_refused_and_a_silent_node_is_named(joined):
    with pytest.raises(MixedCluster, match="n1 have some, n2 only count them"):
        joined({"n1": 8, "n2": 0})
    with pytest.raises(TimeoutError, match="did not say within 3 s .* n2: TimeoutError: late"):
        joined({"n1": 8, "n2": TimeoutError("late")})
