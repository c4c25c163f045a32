from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from openrlhf_ext.options.sections import Reward
from openrlhf_ext.rewards.grading import (
    RewardError,
    RewardImportError,
    RewardInvalid,
    RewardPoolClosed,
    RewardRaised,
    RewardResult,
    RewardTimeout,
    RewardWorkerDied,
)
from openrlhf_ext.rewards.pool import RewardPool
from tests.patience import PATIENCE_S, SOONER_S, until

REWARD_FILE = """
import os, subprocess, sys, time
from helper import SCALE

def reward_func(queries, prompts, labels, **kwargs):
    query, prompt, label = queries[0], prompts[0], labels[0]
    assert len(queries) == len(prompts) == len(labels) == 1 and kwargs == {"completions": [query[len(prompt):]]}
    command = query[len(prompt):]
    if command == "raise":
        raise KeyError("no such unit")
    if command == "exit":
        sys.exit("leaving")
    if command == "os._exit":
        os._exit(3)
    if command == "segfault":
        import faulthandler
        faulthandler._sigsegv()
    if command == "kill":
        os.kill(os.getpid(), 9)
    if command == "hang":
        time.sleep(3600)
    if command == "hang with child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open(label, "w").write(str(child.pid))
        time.sleep(3600)
    if command == "hang in native code":
        sum(range(10**12))
    if command == "die with child":
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    if command == "meet":
        open(f"{label}/{os.getpid()}", "w").close()
        while len(os.listdir(label)) < 2:
            time.sleep(0.01)
    if command == "print":
        for _ in range(2000):
            print("noise" * 100)
        sys.stdout.flush()
        os.write(1, b"raw noise")
    if command == "take a lot":
        return {"rewards": float(len(bytearray(1 << 30)) > 0)}
    if command.startswith("environment "):
        found = os.environ.get(command.removeprefix("environment "))
        return {"rewards": 0.0, "extra_logs": {"found": float(found == "secret")}}
    if command.startswith("return "):
        return eval(command[len("return "):], {"label": label})
    return {"rewards": SCALE * 0.5, "scores": 1, "extra_logs": {"pid": os.getpid()}}
"""


def options(path: Path, **own: Any) -> Reward:
    return Reward(remote_url=str(path), **own)


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "helper.py").write_text("SCALE = 1.0\n")
    path = folder / "reward.py"
    path.write_text(REWARD_FILE)
    return path


@pytest.fixture(scope="module")
def pool(reward_path: Path) -> Iterator[RewardPool]:
    with RewardPool(options(reward_path, num_workers=2, timeout_s=PATIENCE_S)) as pool:
        yield pool


@pytest.fixture
def short_pool(reward_path: Path) -> Iterator[RewardPool]:
    with RewardPool(options(reward_path, num_workers=1, timeout_s=1.5)) as pool:
        pool.check()
        yield pool


def grade(pool: RewardPool, completion: str, label: object = "gold") -> RewardResult:
    return asyncio.run(pool.grade("2+2=" + completion, "2+2=", label))


def pid_of(pool: RewardPool) -> int:
    """Of one of its workers."""
    return int(grade(pool, "4").extra_logs["pid"])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids: list[int]) -> None:
    until(lambda: not any(map(alive, pids)), f"{pids} have ended")


def test_grades_a_sample(pool: RewardPool) -> None:
    result = grade(pool, "4")
    assert (result.reward, result.score) == (0.5, 1.0)
    assert 0 <= result.seconds < PATIENCE_S


def test_a_worker_takes_no_more_memory_than_it_may(reward_path: Path) -> None:
    with RewardPool(
        options(reward_path, num_workers=1, timeout_s=PATIENCE_S, memory_mib=512)
    ) as pool:
        pid = pid_of(pool)
        with pytest.raises(
            RewardRaised, match="(?s)MemoryError.*may take 512 MiB: raise --reward.memory_mib"
        ):
            grade(pool, "take a lot")
        assert pid_of(pool) == pid, "the worker goes on"


def test_workers_get_the_variables_that_are_named(
    reward_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "MY_JUDGE", "TEAM_URL", "REWARD_KIND"):
        monkeypatch.setenv(name, "secret")
    environment = ("MY_JUDGE", "TEAM_*")
    with RewardPool(
        options(reward_path, num_workers=1, timeout_s=PATIENCE_S, environment=tuple(environment))
    ) as pool:
        found = {
            name: grade(pool, f"environment {name}").extra_logs["found"]
            for name in ("WANDB_API_KEY", "MY_JUDGE", "TEAM_URL", "REWARD_KIND")
        }
    assert found == {"WANDB_API_KEY": 0.0, "MY_JUDGE": 1.0, "TEAM_URL": 1.0, "REWARD_KIND": 1.0}


@pytest.mark.parametrize(
    "value",
    [
        "0.25",
        "[0.25]",
        "(0.25,)",
        "__import__('fractions').Fraction(1, 4)",
        "__import__('numpy').float32(0.25)",
        "__import__('numpy').array([0.25])",
    ],
)
def test_accepts_numbers_in_every_usual_form(pool: RewardPool, value: str) -> None:
    result = grade(
        pool, f"return {{'rewards': {value}, 'scores': True, 'extra_logs': {{'format': {value}}}}}"
    )
    assert result == RewardResult(0.25, 1.0, {"format": 0.25}, result.seconds)


def test_score_defaults_to_the_reward_and_logs_to_none(pool: RewardPool) -> None:
    result = grade(pool, "return {'rewards': 0.75}")
    assert (result.score, result.extra_logs) == (0.75, {})


def test_label_keeps_its_type(pool: RewardPool) -> None:
    assert grade(pool, "return {'rewards': label['gold']}", {"gold": 7}).reward == 7.0


def test_a_raising_function_is_reported_with_sample_and_traceback(pool: RewardPool) -> None:
    with pytest.raises(RewardRaised) as caught:
        grade(pool, "raise")
    error = caught.value
    assert (error.prompt, error.completion, error.label) == ("2+2=", "raise", "gold")
    assert "KeyError: 'no such unit'" in error.message and "reward.py" in error.message
    assert "worker.py" not in error.message
    assert all(part in str(error) for part in ("'2+2='", "'raise'", "'gold'"))


def test_sys_exit_is_a_failure_of_the_sample(pool: RewardPool) -> None:
    with pytest.raises(RewardRaised, match="SystemExit: leaving"):
        grade(pool, "exit")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("None", "must return a dict"),
        ("0.5", "must return a dict"),
        ("{}", "without the key 'rewards'"),
        ("{'reward': 1.0}", r"keys are \['reward'\]"),
        ("{'rewards': None}", "rewards = 'None'"),
        ("{'rewards': float('nan')}", "rewards = nan; it must be finite"),
        ("{'rewards': 1e300}", "rewards = 1e.300; it must be at most 1e.15"),
        ("{'rewards': 1, 'scores': float('inf')}", "scores = inf"),
        ("{'rewards': [0.1, 0.2]}", "one real number"),
        ("{'rewards': __import__('numpy').zeros((2, 3))}", r"shape \(2, 3\)"),
        ("{'rewards': '1.0'}", "one real number"),
        ("{'rewards': 1j}", "one real number"),
        ("{'rewards': 10 ** 400}", "too large"),
        ("{'rewards': 1, 'extra_logs': {'text': 'abc'}}", r"extra_logs\['text'\]"),
        ("{'rewards': 1, 'extra_logs': {'kl': 1}}", "reserved"),
        ("{'rewards': 1, 'extra_logs': {3: 1}}", "not strings"),
        ("{'rewards': 1, 'extra_logs': [1]}", "dict of numbers"),
    ],
)
def test_an_invalid_answer_names_key_rule_and_value(
    pool: RewardPool, answer: str, complaint: str
) -> None:
    with pytest.raises(RewardInvalid, match=complaint):
        grade(pool, f"return {answer}")


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("os._exit", "exited with status 3"),
        ("kill", "SIGKILL"),
        ("segfault", "SIGSEGV(.|\n)*reward.py"),
    ],
)
def test_a_dead_worker_is_reported_and_replaced(pool: RewardPool, command: str, how: str) -> None:
    with pytest.raises(RewardWorkerDied, match=how) as caught:
        grade(pool, command)
    assert caught.value.completion == command
    assert grade(pool, "4").reward == 0.5


def test_a_worker_whose_child_keeps_the_connection_is_found_dead(pool: RewardPool) -> None:
    with pytest.raises(RewardWorkerDied, match="status 0"):
        grade(pool, "die with child")


def test_printing_a_lot_harms_nothing(pool: RewardPool) -> None:
    assert grade(pool, "print").reward == 0.5


@pytest.mark.parametrize("command", ["hang", "hang in native code"])
def test_a_hanging_function_is_killed_at_the_deadline(short_pool: RewardPool, command: str) -> None:
    pid, started = pid_of(short_pool), time.monotonic()
    with pytest.raises(
        RewardTimeout, match=r"within 1.5 s \(--reward.timeout_s\)(.|\n)*reward.py"
    ) as caught:
        grade(short_pool, command)
    assert time.monotonic() - started < SOONER_S
    assert caught.value.completion == command
    wait_until_dead([pid])
    assert grade(short_pool, "4").reward == 0.5


def test_the_processes_of_a_hanging_function_die_with_it(
    short_pool: RewardPool, tmp_path: Path
) -> None:
    with pytest.raises(RewardTimeout):
        grade(short_pool, "hang with child", str(tmp_path / "pid"))
    wait_until_dead([int((tmp_path / "pid").read_text())])


def test_an_idle_worker_that_died_costs_no_sample(short_pool: RewardPool) -> None:
    pid = pid_of(short_pool)
    os.kill(pid, signal.SIGKILL)
    wait_until_dead([pid])
    assert grade(short_pool, "4").reward == 0.5


def test_a_sample_that_waits_too_long_fails_with_the_remedy(reward_path: Path) -> None:
    async def overload(pool: RewardPool) -> list[object]:
        samples = [pool.grade(f"{i}hang", str(i), "") for i in range(3)]
        return await asyncio.gather(*samples, return_exceptions=True)

    with RewardPool(
        options(reward_path, num_workers=1, timeout_s=2.0), queue_timeout_s=1.0
    ) as pool:
        pool.check()
        outcomes = asyncio.run(overload(pool))
    assert all(isinstance(outcome, RewardTimeout) for outcome in outcomes)
    assert "--reward.num_workers" in str(outcomes[1])


def test_workers_share_the_samples(pool: RewardPool, tmp_path: Path) -> None:
    async def two() -> list[RewardResult]:
        return await asyncio.gather(*(pool.grade("pmeet", "p", str(tmp_path)) for _ in range(2)))

    assert len({result.extra_logs["pid"] for result in asyncio.run(two())}) == 2


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def reward(queries): pass", r"defines no function reward_func; it defines \['reward'\]"),
        ("def reward_func(:", "SyntaxError"),
        ("raise SystemExit(2)", "SystemExit"),
        ("import os; os._exit(9)", "exited with status 9"),
    ],
)
def test_a_file_that_does_not_import_is_reported_at_the_start(
    tmp_path: Path, source: str, complaint: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(RewardImportError, match=complaint):
        checked(path)
    with (
        RewardPool(options(path, num_workers=1)) as pool,
        pytest.raises(RewardImportError, match=complaint),
    ):
        asyncio.run(pool.grade("a", "a", ""))


FORMS = {
    "def reward_func(prompts, queries, labels): ...": "prompts, queries not in its place. Each is a list of one",
    "def reward_func(queries, labels): ...": "too many positional arguments. Each is a list of one",
}


@pytest.mark.parametrize("source", FORMS)
def test_a_function_that_cannot_be_called_is_refused_before_the_first_sample(
    tmp_path: Path, source: str
) -> None:
    path = tmp_path / "form.py"
    path.write_text(source)
    with pytest.raises(RewardImportError, match=FORMS[source]) as error:
        checked(path)
    assert f"{path}, line 1: reward_func(" in str(
        error.value
    ) and "reward_func(queries, prompts" in str(error.value)


def test_trls_function_is_called_and_how_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trl.py"
    path.write_text(
        "async def reward(completions, answer, **kwargs):\n    return [float(completions == "
        "answer)]\n"
    )
    with caplog.at_level("INFO"), RewardPool(options(path, num_workers=2)) as pool:
        pool.check()
        assert pool.submit("q: 4", "q: ", "4", "4").result() == RewardResult(1.0, 1.0, {}, ANY)
    said = (
        "trl.py: reward is called in TRL's form, with all completions of a prompt; answer is "
        "the label"
    )
    assert caplog.text.count(said) == 1


def checked(path: Path, start_timeout_s: float = 120.0) -> None:
    with RewardPool(options(path, num_workers=1), start_timeout_s=start_timeout_s) as pool:
        pool.check()


def test_an_import_that_hangs_is_reported_with_its_stack(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(3600)\n")
    with pytest.raises(RewardImportError, match="within 5 s(.|\n)*slow.py"):
        checked(path, start_timeout_s=5.0)


def test_the_address_is_what_stands_between_commas(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return 1.0\n"
    )
    checked(Path(f" {tmp_path}/reward.py ,"))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RewardImportError, match="--reward.remote_url: there is no file"):
        checked(tmp_path / "none.py")


def test_close_ends_every_process_and_every_waiting_sample(reward_path: Path) -> None:
    pool = RewardPool(options(reward_path, num_workers=2, timeout_s=PATIENCE_S))
    pool.check()
    pid = pid_of(pool)
    futures = [pool.submit("hang", "", "") for _ in range(5)]
    time.sleep(0.2)
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < SOONER_S
    assert all(isinstance(future.exception(timeout=0), RewardPoolClosed) for future in futures)
    wait_until_dead([pid])
    with pytest.raises(RewardPoolClosed):
        pool.submit("4", "", "")


@pytest.mark.parametrize("command", ["4", "hang in native code"])
def test_workers_die_with_a_killed_parent(reward_path: Path, command: str) -> None:
    program = (
        "import psutil, time; from openrlhf_ext.rewards.pool import RewardPool\n"
        "from openrlhf_ext.options.sections import Reward\n"
        f"pool = RewardPool(Reward(remote_url={str(reward_path)!r})); pool.check(); "
        f"pool.submit({command!r}, '', '')\ntime.sleep(0.3); print(*(c.pid for c in "
        "psutil.Process().children()), flush=True); time.sleep(3600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_until_dead(pids)


def test_a_worker_imports_neither_torch_nor_numpy(reward_path: Path) -> None:
    heavy = "{'torch', 'numpy', 'openrlhf', 'ray'} & set(__import__('sys').modules)"
    with RewardPool(options(reward_path, num_workers=1)) as fresh:
        assert grade(fresh, f"return {{'rewards': len({heavy})}}").reward == 0


@pytest.mark.parametrize("kind", [RewardRaised, RewardInvalid, RewardTimeout, RewardWorkerDied])
def test_errors_pickle(kind: type[RewardError]) -> None:
    error = kind("what", "p", "c", {"gold": 1})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error) and copy.label == {"gold": 1}


def test_importing_the_pool_is_light() -> None:
    program = (
        "import sys, openrlhf_ext.rewards.pool\n"
        "print({'torch', 'numpy', 'aiohttp', 'openrlhf', 'ray'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert output.stdout.strip() == "set()"


def test_a_function_gets_completions_if_it_takes_them(tmp_path: Path) -> None:
    answer = "{'rewards': float(%s)}"
    for arguments, rewarded in (
        ("queries, prompts, labels, completions", "completions == ['4']"),
        ("queries, prompts, labels, completions=None", "completions == ['4']"),
        ("queries, prompts, labels, **more", "more == {'completions': ['4']}"),
        ("queries, prompts, labels", "queries == ['2+2=4</s>']"),
    ):
        path = tmp_path / "takes.py"
        path.write_text(f"def reward_func({arguments}):\n    return {answer % rewarded}\n")
        with RewardPool(options(path, num_workers=1, timeout_s=PATIENCE_S)) as pool:
            assert asyncio.run(pool.grade("2+2=4</s>", "2+2=", "", "4")).reward == 1.0, arguments


CHILDREN = """
import multiprocessing, pickle, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
def _grade(text, truth):
    return float(truth in text)
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert pickle.loads(pickle.dumps(_grade)) is _grade
    if extra_info == "program":
        subprocess.run([sys.executable, "-c", "import my_grader; my_grader._grade"], check=True)
        return 1.0
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(extra_info)) as children:
        return children.submit(_grade, solution_str, ground_truth).result(timeout=60)
"""


def test_processes_that_a_reward_file_starts_import_it_by_its_name(tmp_path: Path, caplog) -> None:
    path = tmp_path / "my_grader.py"
    path.write_text(CHILDREN)
    with RewardPool(options(path, num_workers=1)) as pool:
        for way in ("spawn", "forkserver", "program"):
            label = {"ground_truth": "4", "extra_info": way}
            assert asyncio.run(pool.grade("q: 4", "q: ", label)).reward == 1, way
    assert [*tmp_path.iterdir()] == [path], "nothing is written beside a user's file"


def test_a_file_whose_name_a_library_has_is_imported_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "colorsys.py"
    path.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': 1.0}\n")
    code = (
        "from openrlhf_ext.rewards.worker import load_reward_function as load; "
        f"print(load({str(path)!r})([], [], []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'rewards': 1.0}"
    assert (
        "its processes cannot import it as colorsys, which is " in done.stderr
        and "rename it" in done.stderr
    )
