"""Which faults a seed draws, and what they do to a process."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from openrlhf_ext.tools.chaos.faults import FAULTS, Drawn, NotThere, draw
from openrlhf_ext.tools.chaos.watch import KINDS, PHASES
from tests.patience import until


@pytest.fixture
def victim():
    code = "import time; print(flush=True); time.sleep(600)"
    process = psutil.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait()
    process.stdout.close()


def run_of(folder: Path, **kinds: Any) -> Any:
    return SimpleNamespace(folder=folder, kinds=kinds, kill=lambda: None)


def test_the_same_seed_draws_the_same_faults_and_another_one_others():
    names = sorted(FAULTS)
    first = [draw(7, trial, names, 6) for trial in range(300)]
    assert first == [draw(7, trial, names, 6) for trial in range(300)]
    assert first != [draw(8, trial, names, 6) for trial in range(300)]
    drawn = [one for faults in first for one in faults]
    assert {one.phase for one in drawn} == set(PHASES) and len({one.fault for one in drawn}) > 30
    assert all(one.phase in FAULTS[one.fault].phases for one in drawn)
    assert all(
        [one.step for one in faults] == sorted(one.step for one in faults) for faults in first
    )


def test_what_is_done_while_a_checkpoint_loads_follows_a_kill():
    for trial in range(200):
        faults = draw(1, trial, ["checkpoint_removed"], 4)
        if faults[-1].phase == "loading":
            assert [one.fault for one in faults] == ["kill_command", "checkpoint_removed"]
            return
    pytest.fail("loading was never drawn")


def test_every_fault_is_about_a_kind_of_process_that_is_known():
    for name, fault in FAULTS.items():
        assert fault.victim in {*KINDS, "driver", "command"}, name
        assert fault.needs in {"", "root", "netem", "reward", *KINDS} and set(fault.phases) <= set(
            PHASES
        ), name


def test_a_process_is_killed_stopped_and_paused(victim, tmp_path, monkeypatch):
    def stopped() -> bool:
        return victim.status() == psutil.STATUS_STOPPED

    waited: list[int] = []

    def resume() -> None:
        until(stopped, "the stop")
        waited.append(1)
        victim.send_signal(signal.SIGCONT)

    monkeypatch.setattr(victim, "resume", resume)
    FAULTS["pause_rank"].act.func(signal.SIGSTOP, 0.2, run_of(tmp_path), victim)
    until(lambda: waited and not stopped(), "going on")
    Drawn("stop_rank", "training", 1, 0.5).inject(run_of(tmp_path, rank=[victim]))
    until(stopped, "the stop for ever")
    Drawn("kill_rank", "training", 1, 0.5).inject(run_of(tmp_path, rank=[victim]))
    assert victim.wait() == -signal.SIGKILL


def test_limits_are_those_of_the_process(victim, tmp_path):
    Drawn("disk_rank", "saving", 1, 0.0).inject(run_of(tmp_path, rank=[victim]))
    Drawn("memory_engine", "saving", 1, 0.0).inject(run_of(tmp_path, engine=[victim]))
    assert victim.rlimit(resource.RLIMIT_FSIZE)[0] == 4096
    room = victim.rlimit(resource.RLIMIT_AS)[0] - victim.memory_info().vms
    assert room == 16 << 20


def test_the_newest_checkpoint_is_damaged_or_removed(tmp_path, victim):
    run = run_of(tmp_path, command=[victim])
    with pytest.raises(NotThere, match="no checkpoint"):
        Drawn("checkpoint_cut", "saving", 1, 0.0).inject(run)
    with pytest.raises(NotThere, match="checkpoints"):
        Drawn("checkpoints_removed", "saving", 1, 0.0).inject(run)
    file = tmp_path / "checkpoints/global_step3/policy/rank00000.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(100))
    Drawn("checkpoint_flipped", "saving", 1, 0.0).inject(run)
    assert file.read_bytes() == bytes(50) + b"\1" + bytes(49)
    Drawn("checkpoint_cut", "saving", 1, 0.0).inject(run)
    assert file.stat().st_size == 50
    Drawn("checkpoint_removed", "saving", 1, 0.0).inject(run)
    assert not file.exists() and (tmp_path / "checkpoints").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("{}")
    Drawn("run_removed", "saving", 1, 0.0).inject(run)
    assert (
        not (tmp_path / "run").exists() and (tmp_path / "removed/metrics.jsonl").read_text() == "{}"
    )


def test_a_victim_that_is_not_there_is_said(tmp_path):
    with pytest.raises(NotThere, match="no process critic"):
        Drawn("kill_critic", "training", 1, 0.0).inject(run_of(tmp_path, rank=[]))


def test_a_reward_function_is_counted_and_misbehaves_once(tmp_path):
    from openrlhf_ext.tools.chaos.reward import Spoiled

    user = tmp_path / "user.py"
    user.write_text(
        "def reward_func(queries, prompts, labels): return {'rewards': len(queries[0]), "
        "'scores': 1}\n"
    )
    spoiled = Spoiled(str(user), str(tmp_path))
    Drawn("reward_raises", "sampling", 1, 0.0).inject(run_of(tmp_path, command=[psutil.Process()]))
    with pytest.raises(RuntimeError, match="chaos raised this"):
        spoiled(["ab"], ["a"], [""])
    (tmp_path / "nan").touch()
    assert math.isnan(spoiled(["ab"], ["a"], [""])["rewards"])
    assert spoiled(["ab"], ["a"], [""])["rewards"] == 2
    assert (tmp_path / "calls").stat().st_size == 24
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "raises").unlink()
        pytest.fail("it would misbehave again")
