"""The command ``python -m openrlhf_ext.cli.evaluate`` on benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from openrlhf_ext.cli.evaluate import main
from openrlhf_ext.locks import FolderLock
from openrlhf_ext.tools.evaluate.result import summarize, tables
from tests.e2e.jobs import FORKED, behind
from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S, until

QUICK = ["--num_workers", "1"]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_policy(path)
    return path


@pytest.fixture
def aime(tmp_path: Path) -> Path:
    return write(
        tmp_path / "aime.jsonl",
        [{"problem": f"What is {i}+{i}?", "answer": f"{2 * i:03d}"} for i in range(6)],
    )


def boxed(*answers: str) -> list[str]:
    return [f"It is \\boxed{{{answer}}}." if answer else "I do not know." for answer in answers]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Four completions of two problems with the answers 73 and 5."""
    rows = [
        {"problem": 1, "completions": boxed("6", "", "5", "7")},
        {"problem": 0, "completions": boxed("73", "\\frac{146}{2}", "074", "74.0")},
    ]
    return write(tmp_path / "saved.jsonl", rows)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return write(
        tmp_path / "two.jsonl",
        [{"problem": "P", "answer": "073"}, {"problem": "Q", "answer": "005"}],
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_saved_completions_are_counted_as_by_hand(
    tmp_path: Path, two: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = [
        "--completions",
        str(saved),
        "--benchmark",
        f"aime24={two}",
        "--out",
        str(out),
        "--k",
        "1",
        "2",
        "4",
    ]
    assert main([*options, *QUICK]) == 0
    (result,) = json.loads((out / "results.json").read_text())
    # correct are 2 of 4 and 1 of 4
    assert result["accuracy"] == pytest.approx((0.5 + 0.25) / 2)
    assert result["pass_at_k"] == pytest.approx({"1": 0.375, "2": (5 / 6 + 1 / 2) / 2, "4": 1.0})
    # votes of 4: 73, 73 against 74, 74 tie, half right; 5, 6, 7 and no answer tie, a third right
    assert result["majority_at_k"]["4"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert result["ties_at_k"]["4"] == 1.0
    # votes of 2: {73,73} right, {74,74} wrong, four ties; {5,none} right, two ties with 5, three
    # without a right answer
    assert result["majority_at_k"]["2"] == pytest.approx((3 / 6 + 2 / 6) / 2)
    assert result["ties_at_k"]["2"] == pytest.approx((4 / 6 + 3 / 6) / 2)
    for name in ("pass_at_k", "majority_at_k"):
        for k, (low, high) in result[f"{name}_intervals"].items():
            assert low <= result[name][k] <= high and high - low > 0.5, "two problems say little"
    shown = capsys.readouterr().out
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in shown.splitlines()
        if line.startswith("|")
    ]
    assert [row[:2] for row in cells[2:7]] == [
        ["accuracy", "37.5 %"],
        ["pass@2", "66.7 %"],
        ["pass@4", "100.0 %"],
        ["maj@2", "41.7 % (ties: 58.3 %)"],
        ["maj@4", "41.7 % (ties: 100.0 %)"],
    ]
    assert (
        out / "tables.md"
    ).read_text() in shown and f"results in {out} (results.json, tables.md" in shown
    assert (
        "prompt      P\n" in shown
        and "reference   73\ncompletion  [score 1] It is \\boxed{73}." in shown
    )
    first, second = lines_of(out / "aime24.jsonl")[1:]
    assert [each["vote"] for each in first["completions"]] == [0, 0, 1, 1]
    assert [each["vote"] for each in second["completions"]] == [0, None, 1, 2]
    assert [each["extra_logs"]["answered"] for each in second["completions"]] == [1, 0, 1, 1]
    assert result["extra_logs"] == {"answered": 7 / 8} and result["ended"] is None

    again = [
        "--completions",
        str(out / "aime24.jsonl"),
        *options[2:5],
        str(tmp_path / "again"),
        *options[6:],
        *QUICK,
    ]
    assert main(again) == 0, "what --out wrote can be graded again"
    assert (tmp_path / "again/results.json").read_text() == (out / "results.json").read_text()

    first, second = lines_of(out / "aime24.jsonl")[1:]
    other = write(tmp_path / "other.jsonl", [first | {"prompt": "another question"}, second])
    assert main(["--completions", str(other), *options[2:5], str(tmp_path / "third"), *QUICK]) == 2
    says = f"{other}, line 1: these are completions of 'another question', problem 0 is 'P'"
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "source",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 2.0 * (ground_truth in solution_str), 'acc': ground_truth in "
        "solution_str}\n",
        "async def right(completions, answer, **kwargs):\n"
        "    return [float(a in c) for a, c in zip(answer, completions, strict=True)]\n",
    ],
    ids=["verl", "trl"],
)
def test_reward_functions_of_verl_and_trl_grade(source: str, saved: Path, tmp_path: Path) -> None:
    data = write(
        tmp_path / "data.jsonl",
        [{"question": "a", "answer": "73"}, {"question": "b", "answer": "5"}],
    )
    (tmp_path / "theirs.py").write_text(source)
    words = [
        "--data",
        str(data),
        "--completions",
        str(saved),
        "--reward",
        str(tmp_path / "theirs.py"),
        *QUICK,
    ]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    (result,) = json.loads((tmp_path / "out/results.json").read_text())
    assert result["accuracy"] == 2 / 8


def test_where_no_completion_states_an_answer_there_is_no_vote(
    tmp_path: Path, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": problem, "completions": boxed("", "")} for problem in (0, 1)]
    silent, out = write(tmp_path / "silent.jsonl", rows), tmp_path / "out"
    assert (
        main(
            [
                "--completions",
                str(silent),
                "--benchmark",
                f"aime24={two}",
                "--out",
                str(out),
                *QUICK,
            ]
        )
        == 0
    )
    (result,) = json.loads((out / "results.json").read_text())
    assert result["majority_at_k"] == result["majority_at_k_intervals"] == result["ties_at_k"] == {}
    assert "pass@2" in (shown := capsys.readouterr().out) and "maj@" not in shown
    problems = lines_of(out / "aime24.jsonl")[1:]
    voting = [
        p | {"completions": [one | {"score": 1.0, "vote": 0} for one in p["completions"]]}
        for p in problems
    ]
    results = [summarize(each, "aime", "two", None, [1, 2], 0, 1.0) for each in (problems, voting)]
    rows = [line.replace(" ", "") for line in tables(results).splitlines()]
    assert "|benchmark|problems|accuracy(n=2)|pass@2|maj@2|" in rows
    assert "|aime|2|0.0|0.0|-|" in rows and "|aime|2|100.0|100.0|100.0|" in rows


@pytest.mark.parametrize(
    ("more", "complaints"),
    [
        (
            ["--k", "1", "8"],
            ["--k: must be at most the completions of a prompt (--n): got [8] of 4"],
        ),
        (
            ["--benchmark", "math50={aime}"],
            ["there is no benchmark 'math50'; did you mean math500? Known: gsm8k"],
        ),
        (
            ["--benchmark", "hellaswag={aime}"],
            ["there is no benchmark 'hellaswag'. Known: gsm8k, math, math500"],
        ),
        (
            ["--benchmark", "gsm8k={aime}"],
            ["benchmark gsm8k: {aime}, line 1: needs the keys ['question'"],
        ),
        (["--benchmark", "amc23={aime}.gone"], ["{aime}.gone"]),
        (["--benchmark", "{aime}"], ["--benchmark must be NAME=FILE"]),
        (
            [
                "--temperature",
                "-1",
                "--top_p",
                "0",
                "--k",
                "9",
                "--num_workers",
                "999",
                "--benchmark",
                "math={aime}",
                "--model",
                "gone",
            ],
            [
                "temperature: expected number >= 0, got -1",
                "top_p: expected number > 0 and <= 1",
                "num_workers: expected integer >= 1 and <= 256",
                "got [9] of 4",
                "needs the keys ['solution']",
                "--model must be a folder",
            ],
        ),
        (
            ["--engine", "vllm", "--device", "cuda:1"],
            ["--device must be cpu or cuda with --engine vllm: got cuda:1"],
        ),
        (["--device", "cuda"], ["--device cuda: torch finds no CUDA device on this machine"]),
        (["--out", "{aime}"], ["--out must be a folder: {aime} is none"]),
        (
            ["--compare", "{aime.parent}/before.json"],
            [
                "--compare: {aime.parent}/before.json is of 7 problems of aime24, this is of 6 "
                "of aime24: give an earlier"
            ],
        ),
        (
            ["--data", "{aime}"],
            ["give either --benchmark", "--data needs --reward", "(--input_key, --label_key)"],
        ),
        (["--compare", "{aime}"], ["--compare: {aime}: not JSON (Extra data"]),
        (
            ["--compare", "{model}/config.json"],
            [
                "--compare: {model}/config.json: needs accuracy, standard_error, prompts, "
                "samples_per_prompt, score_mean, has "
            ],
        ),
        (
            ["--completions", "{aime}.gone"],
            ["--completions: {aime}.gone cannot be read: No such file"],
        ),
        (["--model", "gone"], ["--model must be a folder with a Hugging Face checkpoint: gone"]),
        (
            ["--completions", "{aime}"],
            ["{aime}, line 1: needs completions, has 'problem', 'answer'"],
        ),
    ],
)
def test_what_is_wrong_is_told_at_once_before_a_model_is_loaded(
    model: Path,
    aime: Path,
    tmp_path: Path,
    more: list[str],
    complaints: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "openrlhf_ext.cli.evaluate._results", lambda request: pytest.fail("goes on")
    )
    before = {
        "benchmark": "aime24",
        "accuracy": 0.5,
        "standard_error": 0.1,
        "prompts": 5,
        "skipped_overlong": 2,
    }
    (aime.parent / "before.json").write_text(
        json.dumps(before | {"samples_per_prompt": 4, "score_mean": 0.5})
    )
    given = [word.format(aime=aime, model=model) for word in more]
    base = [
        "--benchmark",
        f"aime24={aime}",
        "--model",
        str(model),
        "--out",
        str(tmp_path / "out"),
        "--n",
        "4",
    ]
    assert main([*base, *given]) == 2
    shown = capsys.readouterr().err
    for complaint in complaints:
        assert complaint.format(aime=aime, model=model) in shown
    assert len(shown.splitlines()) == 1 + len(complaints) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"problem": 1, "completions": boxed("5")}, "between 1 and 4 completions"),
        ({"problem": 0, "completions": boxed("5")}, "problem 0 is there twice"),
        ({"problem": 7, "completions": boxed("5")}, "lacks 1 of 2 problems, the first is 1"),
    ],
)
def test_completions_that_do_not_belong_are_refused(
    two: Path,
    tmp_path: Path,
    row: dict[str, Any],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(
        tmp_path / "wrong.jsonl", [{"problem": 0, "completions": boxed("1", "2", "3", "4")}, row]
    )
    assert main(["--completions", str(file), "--benchmark", f"aime24={two}"]) == 2
    assert complaint in capsys.readouterr().err


def sampling(model: Path, aime: Path, out: Path) -> list[str]:
    return [
        "--model",
        str(model),
        "--benchmark",
        f"aime24={aime}",
        "--out",
        str(out),
        "--n",
        "2",
        "--batch_size",
        "4",
        "--max_new_tokens",
        "40",
        "--input_template",
        "{}",
        *QUICK,
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_command_goes_on_to_the_same_bytes(
    model: Path, aime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed, options = tmp_path / "whole", tmp_path / "killed", partial(sampling, model, aime)
    assert main(options(whole)) == 0
    command = [sys.executable, "-m", "openrlhf_ext.cli.evaluate", *options(killed)]
    process = subprocess.Popen(
        command, env=os.environ | FORKED, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    file = killed / "aime24.jsonl"
    try:
        until(lambda: file.exists() and file.read_bytes().count(b"\n") >= 2, "no problem is graded")
    finally:
        with suppress(psutil.NoSuchProcess):
            command = behind(psutil.Process(process.pid))
            for each in (*command.children(recursive=True), command):
                each.kill()
        process.wait(PATIENCE_S)
    text = (whole / "aime24.jsonl").read_bytes()
    assert text.startswith(file.read_bytes())
    assert main(options(killed)) == 0
    assert contents(killed) == contents(whole)
    # a kill within the second line of the second group, of which the first is kept and sampled
    # again
    file.write_bytes(text[: sum(map(len, text.splitlines(keepends=True)[:4])) + 25])
    assert main(options(killed)) == 0
    assert contents(killed) == contents(whole)
    capsys.readouterr()

    other = [*options(killed), "--temperature", "0.5", "--seed", "3"]
    assert main(other) == 2
    complaint = capsys.readouterr().err
    assert (
        "temperature was 1.0, is 0.5; seed was 0, is 3" in complaint
        and "or another --out" in complaint
    )
    assert contents(killed) == contents(whole)
    file.write_text(text.decode().replace('"line_format": 2, ', "", 1))
    assert main(options(killed)) == 2
    assert "(line_format was None, is 2)" in capsys.readouterr().err


def test_two_commands_do_not_write_one_folder(
    model: Path, aime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(FolderLock(tmp_path / "out", take_over=False, remedy="")):
        assert main(sampling(model, aime, tmp_path / "out")) == 2
    says = f"--out: {tmp_path}/out is in use by pid {os.getpid()} on "
    assert (
        says in (told := capsys.readouterr().err)
        and "wait until it has ended, or use another --out" in told
    )
    assert not (tmp_path / "out/aime24.jsonl").exists()


def test_the_greedy_answers_of_vllm_are_those_of_transformers_and_it_goes_on_where_it_was_killed(
    model: Path, aime: Path, tmp_path: Path
) -> None:
    written = {}
    greedy = ["--temperature", "0", "--kv_cache_mib", "64"]
    assert main([*sampling(model, aime, tmp_path / "transformers"), *greedy]) == 0
    # a process of its own: the engine changes the environment
    command = [
        sys.executable,
        "-m",
        "openrlhf_ext.cli.evaluate",
        *sampling(model, aime, tmp_path / "vllm"),
        *greedy,
    ]
    run = partial(
        subprocess.run,
        [*command, "--engine", "vllm"],
        env=os.environ | FORKED,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    done = run()
    assert done.returncode == 0, done.stderr
    for engine in ("transformers", "vllm"):
        written[engine] = lines_of(tmp_path / engine / "aime24.jsonl")[1:]
    assert written["vllm"] == written["transformers"]
    for problem in written["vllm"]:
        (answer,) = {completion["text"] for completion in problem["completions"]}
        assert answer

    whole, file = contents(tmp_path / "vllm"), tmp_path / "vllm/aime24.jsonl"
    # settings, a group, and half of the second one
    begun = whole[file.name].splitlines(keepends=True)[:4]
    file.write_bytes(b"".join(begun))
    for name in whole.keys() - {file.name}:
        (file.parent / name).unlink()
    done = run()
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "vllm") == whole and "6 of 6 problems" in done.stderr + done.stdout
