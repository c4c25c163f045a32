from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_ext.tools.evaluate import Problem, load_problems


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "1+1", "answer": "#### 2"}\n\n{"question": "2+2", "answer": {"value": 4}}\n')
    return path


def test_prompts_and_labels_in_file_order(path: Path) -> None:
    assert load_problems(path) == [Problem("1+1", "#### 2"), Problem("2+2", {"value": 4})]
    assert load_problems(path, limit=1) == [Problem("1+1", "#### 2")]


def test_a_template_surrounds_the_prompt(path: Path) -> None:
    assert load_problems(path, input_template="Q: {} A: ", limit=1)[0].prompt == "Q: 1+1 A: "


def test_a_chat_template_is_applied(path: Path) -> None:
    def apply_chat_template(chat: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return f"<{chat[0]['role']}>{chat[0]['content']}"

    tokenizer = SimpleNamespace(apply_chat_template=apply_chat_template)
    assert load_problems(path, chat_tokenizer=tokenizer)[0].prompt == "<user>1+1"


@pytest.mark.parametrize(("line", "complaint"), [
    ('{"question": "1"}', r"line 4: needs the keys \['answer'\], has \['question'\] \(--input_key"),
    ("{broken", "line 4: not JSON"),
    ("[1]", "line 4: needs the keys .* has list"),
])  # fmt: skip
def test_a_wrong_line_is_named(path: Path, line: str, complaint: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=complaint):
        load_problems(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no problem"):
        load_problems(path)
