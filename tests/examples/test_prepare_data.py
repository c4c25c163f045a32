"""examples/python/prepare_data.py, through its command line, on small files in the published
formats."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import prepare_data
import pyarrow
import pyarrow.parquet
import pytest


def gsm8k(question: str, answer: str) -> dict[str, str]:
    return {"question": question, "answer": f"So it is {answer}.\n#### {answer}"}


def dapo(question: str, answer: str) -> dict[str, Any]:
    content = prepare_data.TEMPLATES["dapo"].format(question)
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a"},
    }


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tmp_path: Path, *words: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a run that succeeds has written: records and manifest."""
    output = tmp_path / "out/data.jsonl"
    assert prepare_data.main([*words, "--output", str(output)]) == 0
    manifest = json.loads(output.with_name("data.jsonl.manifest.json").read_text())
    assert manifest["output"]["sha256"] == hashlib.sha256(output.read_bytes()).hexdigest()
    return [json.loads(line) for line in output.read_text().splitlines()], manifest


def test_questions_come_once_and_never_from_the_test_files(tmp_path: Path):
    train = [
        gsm8k("How many?", "1,072"),
        gsm8k("how  many?", "1072"),
        gsm8k("Which?", "2"),
        gsm8k("Which?", "3"),
        gsm8k("Why is x + 1?", "4"),
        gsm8k("Why is x - 1?", "5"),
        gsm8k("Tested already?", "6"),
    ]
    source = write(tmp_path / "train.jsonl", train)
    test = write(
        tmp_path / "test.jsonl", [gsm8k("Tested  already?", "6"), gsm8k("Only there?", "7")]
    )
    records, manifest = run(tmp_path, "gsm8k", source, "--against", f"gsm8k={test}")
    assert records == [
        {"question": "How many?", "answer": "1072", "source": "gsm8k"},
        {"question": "Why is x + 1?", "answer": "4", "source": "gsm8k"},
        {"question": "Why is x - 1?", "answer": "5", "source": "gsm8k"},
    ]
    assert list(manifest["counts"].values()) == [7, 1, 2, 1, 3]
    assert manifest["sources"][0]["sha256"] == {
        source: hashlib.sha256(Path(source).read_bytes()).hexdigest()
    }


def test_worked_solutions_as_answers_to_train_on(tmp_path: Path, capsys):
    source = write(tmp_path / "train.jsonl", [gsm8k("How many?", "1,072")])
    (plain,), _ = run(tmp_path, "gsm8k", source, "--solutions")
    assert plain == {
        "question": "How many?",
        "answer": "1072",
        "solution": "So it is 1,072.",
        "source": "gsm8k",
    }
    (tagged,), _ = run(tmp_path, "gsm8k", source, "--solutions", "--system_prompt", "conflict")
    content = "<reasoning>So it is 1,072.</reasoning>\n<answer>1072</answer>"
    assert tagged["solution"] == [{"role": "assistant", "content": content}]
    assert (
        prepare_data.main(["amc23", source, "--solutions", "--output", str(tmp_path / "x.jsonl")])
        == 2
    )
    assert (
        "--solutions: amc23 has no worked solutions, gsm8k and math have" in capsys.readouterr().err
    )


def test_dapo_17k_as_published(tmp_path: Path):
    """It has every question about a hundred times."""
    table = pyarrow.Table.from_pylist([dapo("What is $1+1$?", "2"), dapo("And $3$?", "34")] * 3)
    pyarrow.parquet.write_table(table, tmp_path / "dapo-math-17k.parquet")
    records, manifest = run(tmp_path, "dapo17k", str(tmp_path / "dapo-math-17k.parquet"))
    assert [record["answer"] for record in records] == ["2", "34"]
    assert records[0]["question"].startswith("Solve the following math problem step by step.")
    assert manifest["counts"]["records read"] == 6


def test_every_benchmark_with_the_conflict_papers_system_prompt(tmp_path: Path):
    published = {
        "math": {
            "problem": "p",
            "solution": "so \\boxed{1} or rather \\boxed{\\frac{1}{2}}.",
            "level": "Level 1",
        },
        "math500": {"problem": "p", "solution": "s", "answer": "\\frac{1}{2}"},
        "aime24": {"problem": "p", "answer": "025"},
        "aime25": {"question": "p", "answer": "336^\\circ"},
        "amc23": {"problem": "p", "question": "p", "answer": 27.0},
    }
    for name, row in published.items():
        source = write(tmp_path / f"{name}.jsonl", [row])
        records, _ = run(
            tmp_path, name, source, "--system_prompt", "conflict", "--template", "Q: {}"
        )
        answer = {"aime24": "25", "aime25": "336", "amc23": "27"}.get(name, "\\frac{1}{2}")
        assert [(record["answer"], record["source"]) for record in records] == [(answer, name)]
        (system, user) = records[0]["question"]
        assert system["role"] == "system" and "<reasoning> and </reasoning>" in system["content"]
        assert user == {"role": "user", "content": "Q: p"}


@pytest.mark.parametrize(
    ("rows", "words", "complaint"),
    [
        (
            [gsm8k("a", "1"), {"question": "b"}],
            [],
            "train.jsonl, line 2: needs the keys ['answer']",
        ),
        (
            [gsm8k("a", "1"), {"question": "b", "answer": "no mark"}],
            [],
            "train.jsonl, line 2: the solution under",
        ),
        ([gsm8k("a", "1"), ["b"]], [], "train.jsonl, line 2: must be a JSON object, got list"),
        ([gsm8k("a", "1")], ["--template", "no place"], "--template must hold one {}"),
        ([gsm8k("a", "1")], ["--against", "train.jsonl"], "--against takes NAME=FILE"),
        ([gsm8k("a", "1")], ["--against", "gsm8k=missing.jsonl"], "there is no file missing.jsonl"),
        ([gsm8k("a", "1"), gsm8k("a", "2")], [], "no record is left to write"),
    ],
)
def test_what_is_damaged_or_wrong_stops_it_with_the_place(
    tmp_path, monkeypatch, capsys, rows, words, complaint
):
    monkeypatch.chdir(tmp_path)
    write(Path("train.jsonl"), rows)
    assert prepare_data.main(["gsm8k", "train.jsonl", "--output", "out.jsonl", *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


def test_a_line_that_is_cut_is_named(tmp_path, capsys):
    source = Path(write(tmp_path / "train.jsonl", [gsm8k("a", "1"), gsm8k("b", "2")]))
    source.write_bytes(source.read_bytes()[:-9])
    assert prepare_data.main(["gsm8k", str(source), "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "train.jsonl, line 2: not JSON" in capsys.readouterr().err
