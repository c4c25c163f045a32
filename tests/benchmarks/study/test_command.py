"""``study.sh`` as it is typed; its ``main`` in this process, where shell and import of torch prove
nothing more."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import toy_policy
import yaml

from benchmarks.study import __main__ as cli
from benchmarks.study.settings import StudyError, read_study
from openrlhf_ext.tools.evaluate.problems import load_problems
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[3]
SMOKE = ROOT / "configs" / "studies" / "smoke.yaml"
CELLS = ["dapo", "gtpo_entropy"]


def command(study: Path, out: Path, *words: str) -> list[str]:
    return ["bash", "examples/scripts/study.sh", str(study), "--out", str(out), *words]


class Main:
    """The command within this process; runs and policies have processes of their own as ever."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, study: Path, out: Path, *words: str) -> tuple[int, str, str]:
        """Exit status, what was printed, what was complained of."""
        self.capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            code = cli.main([str(study), "--out", str(out), *words])
        return code, *self.capsys.readouterr()


def rows(out: Path) -> list[dict[str, Any]]:
    """Those that are written to their end."""
    path = out / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def table(out: Path) -> list[str]:
    """Without the line of times."""
    return [
        line for line in (out / "table.md").read_text().splitlines() if "hours of runs" not in line
    ]


def small() -> dict[str, Any]:
    """Smoke with a policy that is made in seconds, and short evaluations."""
    study = yaml.safe_load(SMOKE.read_text())
    study["tasks"]["fork"]["maker"] = str(
        Path(__file__).with_name("small_policy.py").relative_to(ROOT)
    )
    study["tasks"]["fork"]["evaluation"] = {
        "every": 2,
        "problems": 4,
        "last_problems": 8,
        "samples": 2,
    }
    return study


def written(study: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(study))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Results of two cells, and their study."""
    study = written(small(), tmp_path_factory.mktemp("study") / "small.yaml")
    out = tmp_path_factory.mktemp("whole")
    words = command(study, out, "--only", *CELLS)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return out, study


@pytest.fixture
def out(whole: tuple[Path, Path], tmp_path: Path) -> Path:
    """A study's folder with the policies of another one, and no runs."""
    shutil.copytree(whole[0] / "policies", tmp_path / "out" / "policies")
    return tmp_path / "out"


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    return Main(capsys)


def test_a_study_leaves_tables_figures_and_a_page(whole):
    out, _ = whole
    found = rows(out)
    assert sorted((row["cell"], row["seed"]) for row in found) == [
        (cell, seed) for cell in CELLS for seed in (0, 1)
    ]
    assert all(
        row["commit"] and row["hardware"] and len(row["steps"]["accuracy"]) == 4 for row in found
    )
    assert {row["weights"] for row in found if row["seed"] == 0} != {
        row["weights"] for row in found if row["seed"] == 1
    }
    text = (out / "table.md").read_text()
    assert (
        "4 of 6 runs: **not complete**" in text
        and "| gtpo_entropy - dapo | mean_accuracy, points | 2 |" in text
    )
    page = (out / "study.html").read_text()
    assert page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) == 3
    assert page.count("<table>") == page.count("</table>") == text.count("\n|---") > 0
    assert (out / "cells.csv").read_text().count("mean_accuracy") == 2


def test_a_killed_study_goes_on_to_the_same_table(whole, main, out, tmp_path):
    (reference, study), (cell, _), undisturbed = whole, CELLS, tmp_path / "undisturbed"
    # one run at a time: as little as possible is under way, and done again later
    process = subprocess.Popen(command(study, out, "--only", cell, "--workers", "1"), cwd=ROOT)
    until(lambda: rows(out) or process.poll() is not None, "a row")
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    before = rows(out)
    assert len(before) == 1
    code, text, complaints = main(study, out, "--only", cell)
    assert code == 0, complaints
    assert "1 of 2 runs are there" in text
    assert rows(out)[:1] == before, "nothing is run twice"
    undisturbed.mkdir()
    kept = [json.dumps(row) + "\n" for row in rows(reference) if row["cell"] == cell]
    (undisturbed / "runs.jsonl").write_text("".join(kept))
    assert main(study, undisturbed, "--report")[0] == 0
    assert len(kept) == 2 and table(out) == table(undisturbed)


def test_a_failed_run_is_a_row_and_is_tried_again(main, out, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("raise RuntimeError('no reward today')\n")
    study = small()
    study["tasks"]["fork"]["options"]["reward.remote_url"] = str(reward)
    study["tasks"]["fork"]["seeds"] = 1
    study["cells"] = {name: study["cells"][name] for name in CELLS}
    del study["contrasts"]["A/A"]
    path = written(study, tmp_path / "broken.yaml")
    for _ in range(2):
        code, text, complaints = main(path, out, "--only", "dapo")
        assert code == 1, complaints
        assert "no reward today" in text
    found = rows(out)
    assert [("no reward today" in row["error"]) for row in found] == [True, True]
    assert "## Failed runs" in (out / "table.md").read_text()
    assert len(table(out)) == len(set(enumerate(table(out)))), "one row counts for each run"


@pytest.mark.e2e
def test_a_cell_by_the_whole_stack_has_the_same_curves(whole, main, out, tmp_path):
    reference, _ = whole
    study = small()
    study["tasks"]["fork"]["seeds"] = 1
    stack = {"actor.num_gpus_per_node": 1, "megatron.param_dtype": "fp32"}
    study["cells"]["stack"] = study["cells"]["dapo"] | {"backend": "stack"}
    study["cells"]["stack"]["options"] = study["cells"]["dapo"]["options"] | stack
    path = written(study, tmp_path / "stack.yaml")
    code, text, complaints = main(path, out, "--only", "stack")
    assert code == 0, text + complaints
    (row,) = rows(out)
    local = next(r for r in rows(reference) if (r["cell"], r["seed"]) == ("dapo", 0))
    assert row["weights"] == local["weights"]
    (job,) = (out / "jobs").iterdir()
    samples = [json.loads(line) for line in (job / "samples.jsonl").read_text().splitlines()]
    problems = load_problems(out / "policies" / "fork-s0" / "data" / "train.jsonl")
    random.Random(0).shuffle(problems)  # by the run's seed, as a run in one process does
    assert {sample["prompt"] for sample in samples} == {
        problem.prompt for problem in problems[:32]
    }, "4 steps of 8"
    assert row["steps"].keys() >= local["steps"].keys()
    assert all(len(values) == 4 for values in row["steps"].values())
    assert [(each["step"], each["problems"]) for each in row["evaluations"]] == [
        (0, 8),
        (2, 8),
        (4, 8),
    ]
    assert {"accuracy", "length", "pass@1", "pass@2"} < row["evaluations"][0].keys() - {
        "greedy_accuracy"
    }
    assert not list(job.glob("*.safetensors")), "dozens of runs would fill a disk"
    # of the same policy on 64 completions, drawn by other samplers: shares of two such draws are
    # 0.09 apart (one sigma)
    for name, bound in {"entropy": 0.1, "length": 0.1, "short": 0.3}.items():
        assert row["steps"][name][0] == pytest.approx(
            local["steps"][name][0], rel=0.35, abs=bound
        ), name


def test_a_plan_says_how_long_it_takes_and_keeps_nothing(whole, main, tmp_path):
    code, text, complaints = main(whole[1], tmp_path, "--plan")
    assert code == 0, complaints
    assert "6 runs, 0 of them there" in text and "task fork, local: 6 runs of about" in text
    assert "gtpo_entropy - dapo: 2 seeds are too few to see any difference of mean_accuracy" in text
    assert not rows(tmp_path)


def test_a_probe_says_how_far_gradients_point_apart(whole, main, out):
    """A method under two names has one gradient; another rollout has quite another one."""
    code, text, complaints = main(whole[1], out, "--probe", "dapo")
    assert code == 0, text + complaints
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    shown = {name: numbers for name, *numbers in lines}
    assert [number.split()[0] for number in shown["dapo_again"]] == ["1.000"] * 4
    seeds = json.loads((out / "probe.json").read_text())["seeds"]
    assert sorted(seeds) == ["0", "1"]
    places = [
        [row for row in rows if row["step"] == step] for rows in seeds.values() for step in (0, 2)
    ]
    found = [{row["cell"]: row["cosine"] for row in rows} for rows in places]
    assert all(len(cosines) == 3 for cosines in found)
    # so few completions may all be wrong, and there is no gradient then
    compared = [cosines for cosines in found if None not in cosines.values()]
    assert compared
    for cosines in compared:
        assert cosines["dapo_again"] == pytest.approx(1.0)
        assert (
            abs(cosines["the same method on another rollout"]) < cosines["gtpo_entropy"] < 0.99999
        )
    code, _, complaints = main(whole[1], out, "--probe", "grpo")
    assert code == 2 and "--probe must name a cell" in complaints and "got grpo" in complaints


def test_options_that_exclude_each_other_say_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(SMOKE), "--out", str(tmp_path), "--probe", "dapo", "--plan"])
    assert ended.value.code == 2 and "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["configs/studies/smok.yaml"], "did you mean configs/studies/smoke.yaml?"),
        (["configs/studies/smoke.yaml", "--only", "dappo"], "got dappo; did you mean dapo?"),
        (["x.yaml", "--wokers=2"], "study.sh: unknown option --wokers; did you mean --workers?"),
    ],
)
def test_a_word_that_is_close_is_offered_and_the_status_is_2(words, said, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    try:
        status = cli.main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and said in capsys.readouterr().err


def test_every_fault_of_a_study_is_reported_at_once(main, tmp_path, monkeypatch):
    study = yaml.safe_load(SMOKE.read_text())
    study["cells"]["dapo"]["options"] |= {
        "vllm.num_engines": 2,
        "train.seed": 3,
        "algo.dapo.clip_lo": 0.1,
    }
    study["cells"]["dapo_again"]["task"] = "forks"
    study["contrasts"]["A/A"]["outcome"] = "accuracy"
    study["tasks"]["fork"]["maker"] = "nowhere.py"
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(study))
    code, _, complaints = main(path, tmp_path / "out")
    assert code == 2 and not (tmp_path / "out").exists()
    assert "nowhere.py is not there" in complaints
    assert "cells.dapo_again.task must be one of fork, got 'forks'" in complaints
    study["cells"]["dapo_again"]["task"] = "fork"
    study["cells"]["stack"] = {
        "task": "fork",
        "backend": "stack",
        "options": {"vllm.num_engines": 1, "eval.steps": 2},
    }
    study["contrasts"]["tuned"] = study["contrasts"]["A/A"] | {
        "outcome": "mean_accuracy",
        "tuned_on": 2,
    }
    path.write_text(yaml.safe_dump(study))
    monkeypatch.chdir(ROOT)
    with pytest.raises(StudyError) as error:
        read_study(path)
    for part in (
        "vllm.num_engines is not read",
        "train.seed is given by the study",
        "clip_lo",
        "A/A.outcome must be one of",
        "stack: eval.steps is given by the study",
        "tuned.tuned_on must leave seeds of fork's 2 to compare on, got 2",
    ):
        assert part in str(error.value), error.value
    assert "stack: vllm" not in str(error.value), "the whole stack reads all options"


@pytest.mark.parametrize("name", sorted(path.name for path in SMOKE.parent.glob("*.yaml")))
def test_the_studies_that_are_shipped_can_be_read(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = read_study(SMOKE.with_name(name))
    assert study.arms
    for task in study.tasks.values():
        maker, *words = shlex.split(task.maker or "examples/python/toy_policy.py")
        # the smaller maker above stands in for the first; the second takes no words
        assert Path(maker).stem in ("toy_policy", "real_task")
        assert Path(maker).stem == "real_task" or toy_policy._parse_arguments(
            [*words, "--output_dir", "out"]
        )


def test_the_study_of_ones_own_in_the_documents_can_be_read_and_every_key_is_explained(
    tmp_path, monkeypatch
):
    text = (
        (ROOT / "docs" / "science.md")
        .read_text()
        .split("## A study of your own")[1]
        .split("## Statistics")[0]
    )
    (tmp_path / "my_study.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    for path in ("models/my_model", "data"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("data/train.jsonl", "data/heldout.jsonl", "my_reward.py"):
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    study = read_study(Path("my_study.yaml"))
    assert len(study.arms) == 4
    parts = [*study.tasks.values(), *study.cells.values(), *study.contrasts.values()]
    named = {name for part in parts for name in type(part).model_fields}
    assert not [name for name in named if f"`{name}`" not in text]
