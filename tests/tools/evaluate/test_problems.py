from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from openrlhf_ext.inputs import InputError
from openrlhf_ext.tools.evaluate.problems import (
    Problem,
    PromptStyle,
    digest_of,
    load_benchmark,
    load_problems,
    system_message,
)
from openrlhf_ext.tools.evaluate.protocols import MATH_TEMPLATE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"question": "1+1", "answer": "#### 2"}\n\n{"question": "2+2", "answer": {"value": 4}}\n'
    )
    return path


def test_questions_and_labels_in_file_order(path: Path) -> None:
    assert load_problems(path) == [Problem(0, "1+1", "#### 2"), Problem(1, "2+2", {"value": 4})]
    assert load_problems(path, limit=1) == [Problem(0, "1+1", "#### 2")]


def chat(messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
    assert not tokenize and add_generation_prompt
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


TOKENIZER = SimpleNamespace(apply_chat_template=chat)


@pytest.mark.parametrize(
    ("style", "prompt"),
    [
        (PromptStyle(), "1+1"),
        (PromptStyle(template="Q: {} A: "), "Q: 1+1 A: "),
        (PromptStyle(system_prompt="Think.", template="Q: {}"), "Think.\n\nQ: 1+1"),
        (PromptStyle(chat=True), "<user>1+1"),
        (
            PromptStyle(chat=True, system_prompt="Think.", template="Q: {}"),
            "<system>Think.<user>Q: 1+1",
        ),
        (
            PromptStyle(template=MATH_TEMPLATE),
            "1+1\nPlease reason step by step, and put your final answer within \\boxed{}.",
        ),
    ],
)
def test_a_question_becomes_a_prompt(style: PromptStyle, prompt: str) -> None:
    assert style.fault() is None and style.prompt("1+1", TOKENIZER) == prompt


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("Answer in \\boxed{}: {}", "write other braces twice"),
        ("{question}", "KeyError"),
        ("{", "ValueError"),
        ("no place", "has no {}"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_a_fault(template: str, fault: str) -> None:
    assert fault in PromptStyle(template=template).fault()


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_files_of_every_format_that_training_reads(tmp_path: Path, form: str) -> None:
    rows = [
        {"question": "1+1", "answer": 2, "more": 1},
        {"question": "2+2", "answer": 4, "more": 2},
    ]
    file = tmp_path / f"data.{form}"
    table = pyarrow.Table.from_pylist(rows)
    match form:
        case "jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "json":
            file.write_text(json.dumps(rows))
        case "csv":
            file.write_text("question,answer,more\n1+1,2,1\n2+2,4,2\n")
        case "parquet":
            pyarrow.parquet.write_table(table, file)
        case "arrow":
            with (
                pyarrow.OSFile(str(file), "wb") as sink,
                pyarrow.ipc.new_file(sink, table.schema) as writer,
            ):
                writer.write_table(table)
    problems = load_problems(file)
    labels = ["2", "4"] if form == "csv" else [2, 4]  # every field of a CSV file is a text
    assert problems == [Problem(0, "1+1", labels[0]), Problem(1, "2+2", labels[1])]
    assert digest_of([problem.label for problem in problems]) == digest_of(labels), (
        "labels are plain data"
    )


@pytest.mark.parametrize(
    ("name", "row", "label"),
    [
        ("gsm8k", {"question": "Q", "answer": "1,000+2=<<1000+2=1002>>1,002\n#### 1,002"}, "1002"),
        ("gsm8k", {"question": "Q", "answer": "so -3\n#### -3 "}, "-3"),
        (
            "math",
            {
                "problem": "Q",
                "solution": r"not \boxed{1} but $\boxed{\frac{1}{\sqrt{2}}}$.",
                "level": "Level 1",
            },
            r"\frac{1}{\sqrt{2}}",
        ),
        (
            "math500",
            {"problem": "Q", "solution": r"\boxed{9}", "answer": r"\text{yes}"},
            r"\text{yes}",
        ),
        ("aime24", {"problem": "Q", "question": "Q", "answer": "073"}, "73"),
        ("aime24", {"problem": "Q", "answer": "000"}, "0"),
        ("aime25", {"question": "Q", "answer": r"336^\circ"}, "336"),
        ("aime25", {"question": "Q", "answer": 70}, "70"),
        ("amc23", {"problem": "Q", "question": "Q", "answer": 27.0}, "27"),
        ("amc23", {"question": "Q", "answer": "-1.0"}, "-1"),
    ],
)
def test_benchmarks_as_published(
    tmp_path: Path, name: str, row: dict[str, Any], label: str
) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert load_benchmark(name, file) == [Problem(0, "Q", label)]


@pytest.mark.parametrize(
    ("name", "row", "complaint"),
    [
        (
            "gsm8k",
            {"problem": "Q", "solution": r"\boxed{2}"},
            r"needs the keys \['question', 'answer'\], has \['problem'",
        ),
        ("gsm8k", {"question": "Q", "answer": "2"}, "does not end in '#### '"),
        ("math", {"problem": "Q", "solution": "2"}, r"no \\boxed"),
        ("math", {"problem": "Q", "solution": ["2"]}, "'solution' must be a text"),
        ("math500", {"problem": "Q", "solution": r"\boxed{2}"}, r"needs the keys \['answer'\]"),
        ("aime24", {"problem": "Q", "answer": "1000"}, "from 0 to 999, got '1000'"),
        ("aime25", {"question": "Q", "answer": "3.5"}, "from 0 to 999"),
        ("amc23", {"question": "Q", "answer": 2.5}, "whole number, such as 27.0, got 2.5"),
        ("amc23", {"question": "Q", "answer": float("nan")}, "NaN is no number of JSON"),
        ("hellaswag", {"question": "Q"}, "no benchmark 'hellaswag'. Known: gsm8k, math"),
    ],
)
def test_a_file_of_another_format_is_refused(
    tmp_path: Path, name: str, row: dict[str, Any], complaint: str
) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=complaint):
        load_benchmark(name, file)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            '{"question": "1"}',
            r"line 4: needs the keys \['answer'\], has \['question'\] \(--input_key",
        ),
        ("{broken", "line 4: cannot be read: not JSON"),
        ("[1]", "line 4: must be a JSON object, got a list"),
        (
            '{"question": 7, "answer": "7"}',
            "line 4: has a number under 'question', which must be a text",
        ),
        ('{"question": [], "answer": "7"}', "line 4: has an empty 'question'"),
        ('{"question": "7", "answer": null}', "line 4: has an empty 'answer'"),
        ("[" * 9999, "line 4: cannot be read: nested deeper than 64 levels"),
    ],
)
def test_a_wrong_line_is_named(path: Path, line: str, complaint: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=complaint):
        load_problems(path)


def test_what_is_wrong_in_every_line_is_said_once(path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load_problems(path, input_key="prompt")
    assert str(error.value).count("needs the keys ['prompt']") == 1
    assert str(error.value).endswith("; and 1 more")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no problem"):
        load_problems(path)


def test_a_protocols_name_is_its_message_and_another_word_is_refused() -> None:
    assert system_message("conflict").startswith(
        "You are a helpful assistant for solving math problems."
    )
    assert system_message("Think first.") == "Think first." and system_message(None) is None
    with pytest.raises(InputError, match="'confict' is no protocol's name"):
        system_message("confict")
