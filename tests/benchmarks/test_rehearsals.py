"""Every program that makes a record runs here at a tiny size, and writes what the pages read; or a
test below does.

Where a program starts whole runs, each command it would start passes the command's own
``--dry_run``, and a made-up run stands in for what it would leave.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import record
from openrlhf_ext.cli import report, train_ppo_ray, train_sft
from openrlhf_ext.reporting import METRICS
from tests.models import make_tiny_policy
from tests.tools.report.runs import make_run

sys.path.insert(0, str(record.ROOT / "examples/python"))  # toy_policy, toy_task, reward_arithmetic
BENCHMARKS = record.ROOT / "benchmarks"
COMMITTED = BENCHMARKS / "results"
ELSEWHERE = {  # programs that tests of their own rehearse
    "fp8_study/run.py": "tests/benchmarks/fp8_study/test_fp8_study.py",
    "fp8_study/mismatch.py": "tests/benchmarks/fp8_study/test_mismatch_command.py",
    "reproduce.py": "tests/benchmarks/test_reproduce.py",
    "study/__main__.py": "tests/benchmarks/study/test_command.py",
}
WRITES = re.compile(
    r"\b(?:record|common)\.write\(|^from benchmarks\.record import .*\bwrite\b", re.M
)
# keys of records that no program writes any more
FORMER = {"hardware", "versions", "real_environment", "formula", "corrections"}
NAMES = [
    metric.name
    for metric in METRICS
    if not metric.name.endswith("/*") and metric.name not in ("step", "time", "nonfinite", "label")
]
EVALUATED = {
    "accuracy": 0.5,
    "accuracy_interval": [0.4, 0.6],
    "standard_error": 0.1,
    "prompts": 64,
    "samples_per_prompt": 8,
}
# their values change nothing
OF_A_RUN = ("--ckpt.output_dir", "--ckpt.path", "--logger.metrics_path", "--train.seed")
SHORT_TEMPLATE = "{% for each in messages %}{{ each['content'] }}{% endfor %}"


def program(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder in the place of benchmarks/results."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(record, "RESULTS", folder)
    return folder


@pytest.fixture
def call(results, monkeypatch) -> Callable[..., None]:
    """Calls a program's ``main`` with these words; what it writes goes to ``results``, and pages
    stay as they are."""
    monkeypatch.setattr(record, "write_pages", lambda: None)
    monkeypatch.chdir(record.ROOT)  # some programs go there

    def called(module: ModuleType, *words: object) -> None:
        for name in ("RESULT", "LEARNING", "FIGURE"):
            if isinstance(path := getattr(module, name, None), Path):
                monkeypatch.setattr(module, name, results / path.name)
        monkeypatch.setattr(sys, "argv", [str(module.__file__), *map(str, words)])
        assert not module.main()

    return called


def held(module: ModuleType, *names: str) -> dict[str, Any]:
    """The last of records that were written now: each holds and has the committed one's keys, and
    every text can be made of them."""
    for name in names:
        found = record.load(name)
        assert record.unlike(name, found) == ([], []) and record.commits(found), name
        if (COMMITTED / name).exists():
            assert not json.loads((COMMITTED / name).read_text()).keys() - found.keys() - FORMER, (
                name
            )
    for text in getattr(module, "TEXTS", {}).values():
        assert text().strip()
    return found


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    """Random policies, ``plain`` and with a chat template, and the toy's problems."""
    import toy_policy
    import toy_task

    folder = tmp_path_factory.mktemp("toys")
    tokenizer = toy_policy.build_tokenizer()
    toy_policy.build_model(toy_policy.PolicySettings(), tokenizer).save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    make_tiny_policy(folder / "chat", "llama", chat_template=SHORT_TEMPLATE)
    toy_task.write_task(folder / "data", heldout_size=16)
    return folder


class Commands:
    """In the place of ``subprocess.run``: training is a dry run, and leaves a made-up run where it
    would leave one."""

    def __init__(self, toys: Path) -> None:
        self.toys, self.run, self.seen = toys, subprocess.run, []

    def __call__(self, command: list[Any], **options: Any) -> Any:
        words = [str(word) for word in command]
        if words[0] != sys.executable:
            return self.run(command, **options)
        return subprocess.CompletedProcess(words, 0, stdout=self.done(words[1:]))

    def done(self, words: list[str]) -> str:
        module = words[0] == "-m"
        name = words[1].rpartition(".")[2] if module else Path(words[0]).stem
        words = words[1 + module :]
        given = dict(zip(words, words[1:], strict=False))
        if name in ("train_ppo_ray", "train_sft"):
            self.train(name, words, given)
        elif name == "report":
            assert report.main(words) == 0
        elif name == "evaluate":
            assert Path(given["--data"]).exists() and Path(given["--reward"]).exists(), words
            Path(given["--json"]).write_text(json.dumps(EVALUATED))
        elif name == "toy_policy":
            shutil.copytree(self.toys / "plain", given["--output_dir"])
            shutil.copytree(self.toys / "data", given["--data_dir"], dirs_exist_ok=True)
        elif name == "gym_task":
            shutil.copytree(self.toys / "data", given["--output_dir"], dirs_exist_ok=True)
        else:
            assert name == "real_model", f"nothing stands in for {name} {words}"
            return f"{self.toys / 'chat'}\n"
        return "done\n"

    def train(self, name: str, words: list[str], given: dict[str, str]) -> None:
        """The dry run, once for the same options."""
        of_a_run = {place + 1 for place, word in enumerate(words) if word in OF_A_RUN}
        options = [name, *(word for place, word in enumerate(words) if place not in of_a_run)]
        if options not in self.seen:
            command = {"train_ppo_ray": train_ppo_ray, "train_sft": train_sft}[name]
            assert command.main([*words, "--dry_run"]) == 0, words
            self.seen.append(options)
        metrics = given.get("--logger.metrics_path")
        folder = Path(metrics).parent if metrics else Path(given["--ckpt.output_dir"])
        steps = 20 if "--eval.dataset" in words else 9  # every tenth is evaluated
        make_run(folder, steps, seed=len(list(folder.parent.iterdir())), names=NAMES)


@pytest.fixture
def commands(toys, monkeypatch) -> Commands:
    found = Commands(toys)
    monkeypatch.setattr(subprocess, "run", found)
    return found


# ---- programs that measure in their own process


def test_algorithms(call, results):
    module = program("algorithms")
    small = ("--prompts", 2, "--size", 4, "--positions", 32, "--repeats", 1, "--threads", 1)
    call(module, *small, "--output", results / "algorithms.json")
    held(program("algorithm_tables"), "algorithms.json")


def test_head_speed(call, tmp_path):
    """On a CPU; its ways are those of the H200's record, which has one more."""
    small = ("--device", "cpu", "--tokens", 64, "--hidden", 16, "--vocab", 512, "--repeats", 1)
    call(program("head_speed"), *small, "--output", tmp_path / "head.json")
    found = json.loads((tmp_path / "head.json").read_text())["gpu"]
    on_gpu = json.loads((COMMITTED / "gpu_h200.json").read_text())["runs"]["first"]["checks"]
    theirs = on_gpu["head:benchmark"]["measured"]["gpu"]
    ours = found["tokens 64 hidden 16 vocab 512 tp 8"]
    wanted = theirs["tokens 8192 hidden 5120 vocab 152064 tp 8"]
    assert ours.keys() == wanted.keys()
    for part in wanted.keys() - {"floor_tilings"}:
        assert {name for name in wanted[part] if "chunked" not in name} <= ours[part].keys(), part


def test_plan(call, results):
    call(program("plan"), "--output", results / "plan_cpu.json")
    held(program("plan"), "plan_cpu.json")


# ---- programs that read what others left


def test_quickstart(call, results, tmp_path):
    make_run(tmp_path / "run", 20, names=NAMES)
    for name in ("before", "after"):
        (tmp_path / f"run/{name}.json").write_text(json.dumps(EVALUATED))
    module = program("quickstart")
    call(
        module,
        "--run_dir",
        tmp_path / "run",
        "--minutes",
        7,
        "--output",
        results / "quickstart_cpu.json",
    )
    held(module, "quickstart_cpu.json")


def test_gpu(call, results, tmp_path):
    """The files that the calls on a GPU left, as the committed record has them, make the same
    record."""
    committed, words = json.loads((COMMITTED / "gpu_h200.json").read_text()), []
    for name, run in committed["runs"].items():
        (tmp_path / name / "study").mkdir(parents=True)
        about = {key: committed[key] for key in ("hardware", "versions")} | {
            "started": run["started"]
        }
        checks = {f"tests.gpu.{check}": found for check, found in run["checks"].items()}
        (tmp_path / name / "report.json").write_text(json.dumps(about | {"checks": checks}))
        if "study" in run:
            (tmp_path / name / "study/study.json").write_text(json.dumps(run["study"]))
        words += ["--run", f"{name}={tmp_path / name}", run["commit"]]
    call(program("gpu"), *words, "--output", results / "gpu_h200.json")
    assert held(program("gpu"), "gpu_h200.json")["runs"] == committed["runs"]


# ---- programs that start whole runs


def test_curves(call, results, tmp_path, commands, monkeypatch):
    module = program("curves")
    monkeypatch.setattr(module, "CORRIDORS", tmp_path / "curves")
    few = {"trusted": range(11, 16), "fresh": range(21, 22)}
    recipes = {name: dataclasses.replace(recipe, **few) for name, recipe in module.RECIPES.items()}
    monkeypatch.setattr(module, "RECIPES", recipes)
    call(module, "--work", tmp_path / "work")
    assert held(module, "curves_cpu.json")["recipes"].keys() == recipes.keys()
    assert len(commands.seen) == 3


def test_hybrid(call, results, tmp_path, commands, toys, monkeypatch):
    module = program("hybrid")

    def warm_started(folder: Path, log: bool) -> None:
        settings, tokenizer = toy_policy.PolicySettings(), toy_policy.build_tokenizer()
        toy_policy.build_model(settings, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    toy_policy = module.toy_policy
    for name, stand_in in (("build_model", toy_policy.build_model), ("build_policy", warm_started)):
        monkeypatch.setattr(toy_policy, name, stand_in)
    call(module, "--work", tmp_path / "work")
    found = held(module, "hybrid_cpu.json")["toys"]
    assert found["hybrid"]["parameters"] != found["dense"]["parameters"]
    assert len(commands.seen) == 2


def test_real_model(call, results, tmp_path):
    committed = json.loads((COMMITTED / "real_model.json").read_text())
    shutil.copy(COMMITTED / "real_model.json", results)
    script = make_run(tmp_path / "script", 20, names=NAMES)
    for name in ("before", "after"):
        (script / f"{name}.json").write_text(json.dumps(EVALUATED))
    module = program("real_model")
    call(module, "--script", script, "--minutes", 14, "--commit", "0123456")
    found = record.load("real_model.json")
    assert found["cells"] == committed["cells"] and found["before"] == committed["before"]
    assert found["script"].keys() == committed["script"].keys()
    assert "0123456" in record.commits(found) and "took 14 minutes" in module.text()


@pytest.mark.parametrize("mode", ["lora", "train_sft"])
def test_faults(mode, call, results, tmp_path, commands, monkeypatch):
    module, trials = (
        program("faults"),
        json.loads((COMMITTED / "faults_cpu.json").read_text())["trials"],
    )
    known = {
        name: value for name, value in trials[0].items() if name not in ("trial", "mode", "only")
    }

    def undisturb(campaign: Any) -> tuple[float, list[str], int]:
        words = campaign.command(tmp_path / "run", ["--train.max_restarts", "0"])
        assert words[2] in ("benchmarks.faults_inside", "openrlhf_ext.cli.train_sft")
        commands.done(
            [
                "-m",
                words[2].replace("benchmarks.faults_inside", "openrlhf_ext.cli.train_ppo_ray"),
                *words[3:],
            ]
        )
        return 70.0, [], 24

    monkeypatch.setattr(module.Campaign, "undisturb", undisturb)
    monkeypatch.setattr(module.Campaign, "trial", lambda *_, **__: known)
    monkeypatch.setattr(module, "FAULTS", dict(module.FAULTS))
    ticks = iter([0.0, 0.0, *[100.0] * 9])
    monkeypatch.setattr(module, "time", type("Clock", (), {"monotonic": lambda: next(ticks)}))
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    call(
        module,
        "--work",
        tmp_path / "work",
        "--minutes",
        1,
        "--modes",
        mode,
        "--result",
        results / "faults_cpu.json",
    )
    assert [trial["mode"] for trial in held(module, "faults_cpu.json")["trials"]] == [mode]


def test_silent_faults(call, results, tmp_path, monkeypatch):
    module = program("silent_faults")

    class Lab:
        """Runs that are all alike but for faults."""

        @contextmanager
        def opened(self) -> Iterator[Lab]:
            yield self

        def trial(self, seed: int, fault: Any) -> Any:
            loss = 1.0 + 0.001 * (seed % 5) + (fault is not None)
            steps = [{"step": step, "loss/policy": loss} for step in range(1, module.lab.STEPS + 1)]
            return module.lab.Outcome(seed, steps, [], None, 1.0)

    monkeypatch.setattr(module, "lab_of", lambda *_: Lab())
    words = (
        "--toy",
        tmp_path,
        "--clean",
        2,
        "--labs",
        "full,lora",
        "--result",
        results / "silent_faults_cpu.json",
    )
    call(module, tmp_path / "work", *words)
    found = held(module, "silent_faults_cpu.json")
    assert (
        all(fault["after"] == 1 for fault in found["faults"])
        and found["clean"]["full"]["runs"] == 2
    )


def test_exact(call, results, tmp_path, toys, commands, monkeypatch):
    """tests/benchmarks/test_exact.py has its processes."""
    module, passes = program("exact"), ("logprob", "train", "products")

    def in_process(function: str, place: Path, given: dict[str, Any], ranks: int = 0) -> Any:
        check = {"differ": 0, "tokens": 9, "mean": 0.0, "largest": 0.0}
        return {
            "sample": {"cpu_s": 1.0},
            "score": [check | {"packing": packing} for packing in given.get("packings", ())],
            "passes": {f"{name} {way}": [2.0] for name in passes for way in module.WAYS},
        }[function]

    monkeypatch.setattr(module, "in_process", in_process)
    models = [f"{name}={toys / 'plain'}" for name in module.RECIPES]
    call(module, "--model", *models, "--work", tmp_path / "work")
    found = held(module, "exact_cpu.json")
    assert {part: len(found[part]) for part in module.PARTS} == {
        "bits": 4,
        "tp": 4,
        "cost": 4,
        "steps": 2,
    }
    exact = [words for words in commands.seen if "--train.exact_rollout_enable" in words]
    assert len(exact) == 2 and len(commands.seen) == 4


# ---- end_to_end


def test_end_to_end(call, results, toys, tmp_path, commands, monkeypatch):
    module = program("end_to_end")
    monkeypatch.setattr(module, "QUIET_S", 0.01)

    def started(
        words: list[str], log: Path, env: dict[str, str], timeout_s: float
    ) -> tuple[int, int]:
        log.write_text("")
        if words[1].endswith("end_to_end_trl.py"):
            settings = json.loads(Path(words[2]).read_text())
            assert all(
                Path(settings[name]).exists() for name in ("model", "train", "heldout", "reward")
            )
            make_run(Path(settings["output_dir"]), 10, names=NAMES)
            (log.parent / "versions.json").write_text(json.dumps({"trl": "1.16.0"}))
        elif "openrlhf_ext.cli.train_ppo_ray" in words:
            commands(words)
        else:
            assert words[1:3] == ["-m", "venv"] or words[1:4] == ["-m", "pip", "install"]
            if words[2] == "venv":
                Path(words[3]).mkdir(parents=True)
        return 0, 2**30

    monkeypatch.setattr(module, "run_logged", started)
    example = module.run_example

    def ran(name: str, *arguments: object) -> str:
        """The toys in place of what the package index has."""
        if name == "real_model":
            return f"{toys / 'chat'}\n"
        if name == "gym_task":
            Path(arguments[1]).mkdir(parents=True)
            (Path(arguments[1]) / "train.jsonl").write_text(raw)
            return ""
        return example(name, *arguments)

    raw = json.dumps({"question": "What is 2 + 3?", "answer": "5"}) + "\n"
    raw *= module.REAL_MODEL.prompts * 10
    monkeypatch.setattr(module, "run_example", ran)
    words = ["--seeds", 1, "--steps", 10, "--busiest", 101, "--work", tmp_path / "work"]
    call(module, *words, "--policies", *module.WORKLOADS)
    kept = held(module, "end_to_end_cpu.json")["systems"]
    rows = [row for row in kept if row["processor"] == record.environment()["device"]]
    assert not any("error" in row for row in kept)
    assert {row["system"] for row in rows if row["policy"] == "toy"} == {*module.OURS, "trl"}
    assert {row["system"] for row in rows if row["policy"] == "smollm2"} == {"ours", "trl"}
    (prompts,) = tmp_path.glob("work/data/*/smollm2/train-80.jsonl")
    assert "What is 2 + 3?" in prompts.read_text()


TRL_SIDE = """
import importlib.metadata, json, re, sys, types
lock, folder, kind = sys.argv[1:]
locked = {re.sub("[-_.]+", "-", line.partition("==")[0]).lower() for line in open(lock) if "==" in line}
blocked = {"openrlhf_ext", "benchmarks", "tests"}
if kind == "reward":  # transformers asks for what it can use
    for name, owners in importlib.metadata.packages_distributions().items():
        if not {re.sub("[-_.]+", "-", owner).lower() for owner in owners} & locked:
            blocked.add(name)

class Lacks:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"TRL's environment has no {name}")

sys.meta_path.insert(0, Lacks())
if kind == "reward":
    import runpy
    answers = []
    for text in json.load(sys.stdin):
        for name in ("end_to_end_arithmetic", "end_to_end_reward"):
            function = runpy.run_path(f"{folder}/{name}.py")["reward_func"]
            answers.append(function(["3+4=?" + text], ["3+4=?"], ["3+4=7\\n#### 7"]))
    print(json.dumps(answers))
else:
    try:
        import trl
    except ImportError:  # where only this project's packages are
        trl = sys.modules["trl"] = types.ModuleType("trl")
        trl.GRPOTrainer, trl.GRPOConfig = object, dict
    sys.path.insert(0, folder)
    import end_to_end_trl
    settings = json.loads(open(f"{sys.stdin.read()}").read())
    reward = end_to_end_trl.Reward(settings["reward"], settings["label_key"], end_to_end_trl.Clock())
    rows = end_to_end_trl.read_rows(settings["train"])[:2]
    found = reward(["3+4=?"], ["<answer>7</answer>"], answer=["#### 7"], completion_ids=[[1, 2]])
    end_to_end_trl.configuration(settings)
    print(json.dumps([found, reward.take(), rows]))
"""


def of_trl(kind: str, given: str) -> Any:
    """What TRL's side prints where this project cannot be imported, nor, for rewards, what its lock
    file lacks."""
    words = [
        sys.executable,
        "-I",
        "-c",
        TRL_SIDE,
        BENCHMARKS / "end_to_end_trl.lock",
        BENCHMARKS,
        kind,
    ]
    done = subprocess.run(
        [str(word) for word in words], input=given, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_rewards_need_nothing_that_trl_has_not_and_are_the_quickstarts():
    from reward_arithmetic import reward_func

    work = "<reasoning>3+4=7</reasoning>"
    texts = [
        f"{work}<answer>7</answer><|im_end|>",
        f"{work}<answer>8</answer>",
        "<answer>7</answer>",
        "7",
        "",
        f"{work}<answer>7</answer><answer>7</answer>",
        f"{work}<answer>7</answer> so",
        f"{work}<answer>-7</answer>",
        f"{work}<answer>07</answer><|im_end|><|endoftext|><|endoftext|>",
        f" {work}<answer>7</answer>\n",
    ]
    answers = of_trl("reward", json.dumps(texts))
    assert answers[::2] == [
        reward_func(["3+4=?" + text], ["3+4=?"], ["3+4=7\n#### 7"]) for text in texts
    ]
    assert [answer["rewards"] for answer in answers[1::2]][3] == 1.0


def test_the_number_reward_is_the_real_models():
    from reward_gsm8k import reward_func as gsm8k

    from benchmarks.end_to_end_number import reward_func as number

    texts = [
        "7",
        "3 + 4 = 7",
        "It is -7.",
        "7 and 8",
        "none",
        "",
        "The answer is 7.<|im_end|>",
        "17",
    ]
    for text in texts:
        asked = (["What?" + text], ["What?"], ["7"])
        assert number(*asked)["rewards"] == gsm8k(*asked)["rewards"], text


def test_the_trl_side_needs_nothing_of_ours(toys, tmp_path):
    module = program("end_to_end")
    load = module.WORKLOADS["toy"]
    settings = {
        **dataclasses.asdict(load),
        "train": str(toys / "data/train.jsonl"),
        "label_key": "answer",
        "seed": 1,
        "loss_type": "grpo",
        "reward": str(record.ROOT / load.reward),
        "output_dir": str(tmp_path),
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    rewards, taken, rows = of_trl("program", str(tmp_path / "settings.json"))
    assert rewards == [1.0] and taken["tokens/generated"] == 2 and len(rows) == 2


# ---- all of them


def test_every_program_that_makes_a_record_is_rehearsed():
    here = set(re.findall(r'program\("(\w+)"\)', Path(__file__).read_text()))
    found = {
        str(path.relative_to(BENCHMARKS))
        for path in BENCHMARKS.rglob("*.py")
        if WRITES.search(path.read_text())
    }
    unrehearsed = {
        name
        for name in found - ELSEWHERE.keys() - {"record.py"}
        if name.removesuffix(".py") not in here
    }
    assert not unrehearsed
    for name, test in ELSEWHERE.items():
        text, module = (
            (record.ROOT / test).read_text(),
            name.removesuffix(".py").removesuffix("/__main__"),
        )
        assert module.replace("/", ".") in text or module.rpartition("/")[2] in text, (
            f"{test} runs no {name}"
        )
