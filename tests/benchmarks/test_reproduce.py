"""Items of the papers: all are listed and load at every scale; one is made, with a policy that
knows little. At scale real the commands are checked, and replaced by what they leave."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from benchmarks import real_model, reproduce
from benchmarks.reproduce import Paper, flat, read_papers
from openrlhf_ext.config import build_config, load_config
from openrlhf_ext.config.load import read_command_line
from openrlhf_ext.driver import preflight
from openrlhf_ext.options.sections.evaluate import Evaluate
from openrlhf_ext.options.table import table_of
from openrlhf_ext.reporting.names import METRICS
from tests.config.conftest import load_supervised

ROOT = Path(__file__).resolve().parents[2]
PREPARE = runpy.run_path(str(ROOT / "examples/python/prepare_data.py"))["parser"]()
ITEMS = [(name, item) for name, paper in read_papers().items() for item in paper.items]
RUNS = [(name, run) for name, paper in read_papers().items() for run in paper.runs]


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process: (exit status, output, complaints)."""
    monkeypatch.chdir(ROOT)
    return lambda *words: (reproduce.main(words), *capsys.readouterr())


def test_every_figure_and_table_is_listed_or_has_its_reason(run):
    status, out, _ = run("--list")
    assert status == 0
    listed = {line.split()[0] for line in out.splitlines() if line.startswith("  ")}
    assert {item for _, item in ITEMS} <= listed
    papers = read_papers()
    of_simoni = papers["simoni"].items.keys() | papers["simoni"].missing.keys()
    names = " ".join(of_simoni)
    assert all(
        figure in names
        for figure in ("fig1", "fig2", "fig3", "fig4a", "fig4b", "fig4c", "fig4d", "fig5a")
    )
    assert all(figure in names for figure in ("fig5b", "fig6", "table1"))
    assert {f"fig{n}" for n in range(1, 5)} <= papers["tan_first"].items.keys()
    used = {
        (name, run)
        for name, paper in papers.items()
        for item in paper.items.values()
        for run in item.runs
    }
    assert used == set(RUNS), "every run is of some item"
    tuned = {run for item in papers["simoni"].items.values() for run in item.sft}
    assert tuned == papers["simoni"].sft.keys()


@pytest.mark.parametrize(("name", "item"), ITEMS, ids="-".join)
def test_an_item_loads_at_toy_scale_and_prints_the_clusters_commands(monkeypatch, name, item):
    monkeypatch.chdir(ROOT)
    paper: Paper = read_papers()[name]
    study = reproduce.toy_study(paper, paper.items[item])  # raises StudyError
    assert list(study.cells) == paper.items[item].runs
    commands = list(reproduce.paper_commands(name, paper, item))
    assert f"# ours: {paper.items[item].ours}" in commands
    trained = [line for line in commands if "train_recipe.sh" in line]
    assert len(trained) == len(paper.items[item].runs)
    assert all(shlex.split(line) for line in commands if not line.startswith("#"))
    evaluations = [line for line in commands if line.startswith("openrlhf-ext evaluate")]
    assert bool(evaluations) == bool(paper.items[item].table or paper.items[item].evaluated)
    for line in evaluations:
        read = read_command_line(shlex.split(line)[2:], options := table_of(Evaluate))
        given = {setting.name: setting.value for setting in read.settings}
        assert (
            given["protocol"] == paper.evaluation.protocol
            and not read.violations
            and given.keys() <= options.keys()
        )
    prepared = [
        PREPARE.parse_args(shlex.split(line)[2:]).output
        for line in commands
        if "prepare_data.py" in line
    ]
    train = [line for line in commands if "train_recipe.sh" in line or "train_sft" in line]
    assert {file for line in train for file in re.findall(r"\$DATA/\w+\.jsonl", line)} == set(
        prepared
    )


def test_curves_are_called_as_in_a_runs_metrics():
    names = {metric.name for metric in METRICS}
    curves = {
        curve
        for paper in read_papers().values()
        for item in paper.items.values()
        for curve in item.curves
    }
    assert curves <= reproduce.IN_REPORT.keys()
    assert {reproduce.IN_REPORT[curve] for curve in curves} - {"reward_log/format"} <= names


@pytest.mark.parametrize("name", read_papers()["simoni"].sft)
def test_a_run_of_supervised_fine_tuning_loads(name, tmp_path, monkeypatch):
    paper = read_papers()["simoni"]
    (item,) = [item for item, value in paper.items.items() if value.sft == [name]]
    record = {
        "question": [{"role": "user", "content": "1+1?"}],
        "solution": [{"role": "assistant", "content": "2"}],
    }
    (tmp_path / f"{paper.sft[name].data}.jsonl").write_text(json.dumps(record) + "\n")
    (line,) = [
        line for line in reproduce.paper_commands("simoni", paper, item) if "cli.train_sft" in line
    ]
    monkeypatch.chdir(ROOT)
    typed = line.replace("$DATA", str(tmp_path)).replace("$MODELS", "someone")  # a hub name
    assert load_supervised(shlex.split(typed)[3:]).data.output_key == "solution"


@pytest.mark.parametrize(("name", "run_name"), RUNS, ids="-".join)
def test_a_run_loads_at_the_papers_scale(name, run_name):
    paper = read_papers()[name]
    run = paper.runs[run_name]
    recipe = yaml.safe_load(reproduce.recipe_path(run).read_text())
    sets = ",".join(f"{each}=study/{each}.jsonl" for each in paper.evaluation.benchmarks)
    held_out = (
        {"eval.dataset": sets} if any(option.startswith("eval.") for option in recipe) else {}
    )
    # raises ConfigError
    config = build_config(flat(recipe) | held_out | flat(run.options), files=False)
    assert refused_or_warned(config) == []


def refused_or_warned(config):
    """By the rules of a run's method, and what else the command would say."""
    method = preflight.option_findings(config)
    warned = [*config.warnings, *method.warnings, *preflight.unread_warnings(config)]
    known = (
        "is treated as a hub name",
        "version v2 gives some tokens of wrong completions",
        # one file is for methods with a pass for log-probs and without
        "rollout.micro_batch_size has no effect",
    )
    return [
        *method.violations,
        *(warning for warning in warned if not any(text in warning for text in known)),
    ]


@pytest.mark.parametrize(("name", "run_name"), RUNS, ids="-".join)
def test_a_run_loads_at_the_real_models_scale(name, run_name, monkeypatch):
    monkeypatch.chdir(ROOT)
    paper, commands = read_papers()[name], []
    monkeypatch.setattr(
        real_model, "run_python", lambda *words: commands.append([*map(str, words)])
    )
    options = reproduce.real_options(paper.runs[run_name], paper, steps=20)
    real_model.train("study/policy", ROOT / "runs/x", ROOT / "runs", 20, *reproduce.words(options))
    config = load_config(commands[0][2:], files=False)  # raises ConfigError
    assert refused_or_warned(config) == []
    assert (
        config.rollout.batch_size == real_model.PROMPTS
        and config.data.max_samples == 20 * real_model.PROMPTS
    )
    assert (
        config.train.batch_size == config.rollout.batch_size * config.rollout.n_samples_per_prompt
    )


def test_an_item_is_made_with_the_real_model(run, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(real_model, "run_python", partial(stand_in, made))
    (typed,) = (
        line
        for line in (ROOT / "docs/papers.md").read_text().splitlines()
        if "--scale real" in line
    )
    assert run(*shlex.split(typed)[2:], "--out", str(tmp_path))[0] == 0
    assert made.count("train_ppo_ray") == 3 and "evaluate" not in made, "a figure of curves"

    del made[:]
    status, out, _ = run(
        "simoni", "fig2_llama_math", "--scale", "real", "--steps", "2", "--out", str(tmp_path)
    )
    assert status == 0 and "6 of 6 runs to go" in out and made.count("train_ppo_ray") == 6
    assert made.count("evaluate") == 7, "the start model's, and that of each run"
    (start, row) = (
        line for line in out.splitlines() if line.startswith(("| start ", "| llama_math_g8 "))
    )
    assert start == "| start | 0.25 | 0.4 | 0.5 | 0.75 | 0.875 | 0.25 |"
    assert row == start.replace("start", "llama_math_g8")
    assert "format is left out" in out and "supervised fine-tuning are left out" in out
    assert (tmp_path / "simoni/fig2_llama_math_real.png").stat().st_size > 5000
    assert (tmp_path / "simoni/fig2_llama_math_real.html").exists()

    del made[:]
    status, out, _ = run(
        "simoni", "fig5b", "--scale", "real", "--steps", "2", "--out", str(tmp_path)
    )
    assert status == 0 and "0 of 2 runs to go" in out and made == [], (
        "the same runs: only model and data differ"
    )
    status, out, _ = run(
        "simoni", "fig6", "--scale", "real", "--steps", "2", "--out", str(tmp_path)
    )
    assert "1 of 2 runs to go" in out and made.count("train_ppo_ray") == 1

    for ended in (tmp_path / "real").glob("grpo-*/trained"):
        ended.unlink()  # they were killed
    del made[:]
    monkeypatch.setattr(real_model, "run_python", partial(stand_in, made, fails=True))
    status, _, said = run(
        "simoni", "fig6", "--scale", "real", "--steps", "2", "--out", str(tmp_path)
    )
    assert status == 1 and "the same command goes on" in said


def stand_in(made, *words, output=False, fails=False):
    """What the programs of a real run leave, at once."""
    words = [*map(str, words)]
    made.append(words[1].rpartition(".")[2] if words[0] == "-m" else Path(words[0]).stem)
    value = {name: words[at + 1] for at, name in enumerate(words[:-1]) if name.startswith("--")}
    if made[-1] == "gym_task":
        Path(value["--output_dir"]).mkdir(parents=True, exist_ok=True)
    elif made[-1] == "evaluate":
        shares = {"1": 0.25, "2": 0.4, "4": 0.5, "8": 0.75, "16": 0.875}
        Path(value["--json"]).write_text(json.dumps({"accuracy": 0.25, "pass_at_k": shares}))
    elif made[-1] == "train_ppo_ray":
        if fails:
            raise subprocess.CalledProcessError(143, words)
        assert value["--ckpt.load_enable"] == "true", "an ended run goes on"
        folder = Path(value["--ckpt.output_dir"])
        Path(value["--ckpt.path"]).mkdir(parents=True)
        lines = [{"step": 0, "time": 0.0, "eval/accuracy": 0.1}]
        lines += [
            {"step": step, "time": 1.0 * step, "reward/mean": 0.5, "accuracy/mean": 0.5}
            for step in (1, 2)
        ]
        lines += [{"step": 2, "time": 3.0, "eval/accuracy": 0.2}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "model\n"


def test_an_item_is_made_at_toy_scale(run, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRLHF_EXT_CACHE", str(tmp_path / "cache"))
    papers = yaml.safe_load((ROOT / "configs/papers.yaml").read_text())
    maker = "--family tags --knowledge_steps 6 --careless_steps 3 --heldout_size 8"
    papers["simoni"]["toy"]["maker"] = f"examples/python/toy_policy.py {maker}"
    monkeypatch.setattr(reproduce, "PAPERS", tmp_path / "papers.yaml")
    reproduce.PAPERS.write_text(yaml.safe_dump(papers))
    status, out, _ = run("simoni", "fig1", "--steps", "2", "--out", str(tmp_path), "--workers", "1")
    assert status == 0 and "| llama_gsm8k_grpo_g8_kl |" in out
    assert (tmp_path / "simoni/fig1.png").stat().st_size > 5000
    assert "completion_entropy" in (tmp_path / "simoni/fig1.md").read_text()
    again, out, _ = run("simoni", "fig1", "--steps", "2", "--out", str(tmp_path))
    assert again == 0 and "0 of 2 runs to go" in out


def test_a_name_that_is_not_there_is_told_the_nearest_one(run):
    assert run("simone", "fig1")[0] == 2
    status, _, complaint = run("simoni", "fig33")
    assert status == 2 and "did you mean fig3" in complaint
    assert "did you mean fig5a or fig5b?" in run("simoni", "fig5")[2]
    assert "did you mean simoni?" in run("2508.03772", "fig5")[2]
    assert "did you mean tan_first or tan_v6?" in run("2508.04349", "fig1")[2]
    assert "has no command" in run("tan_v6", "fig1")[2]
    assert (
        "need --scale toy, got real" in run("tan_v6", "fig5", "--scale", "real", "--seeds", "2")[2]
    )


def test_the_page_has_every_item_and_every_picture_that_was_made():
    """Not the planned hours, which cost a call of the planner for each recipe."""
    page = (ROOT / "docs/papers.md").read_text()
    made = json.loads(reproduce.RECORD.read_text())["items"]
    for name, paper in read_papers().items():
        for item_name, item in paper.items.items():
            start = f"| {reproduce.item_link(f'{name} {item_name}', made)} | {item.what} | "
            assert len([line for line in page.splitlines() if line.startswith(start)]) == 1
        assert all(
            f"| {name} {item} | no command: {why} | " in page for item, why in paper.missing.items()
        )
    assert {tuple(item.split()) for item in made} <= set(ITEMS)
    assert all((ROOT / found["picture"]).stat().st_size < 60_000 for found in made.values())
