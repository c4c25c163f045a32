"""Problem files for evaluation: one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """A prompt, ready for the tokenizer, and the label the reward function gets."""

    prompt: str
    label: Any


def load_problems(
    path: str | Path,
    input_key: str = "question",
    label_key: str = "answer",
    limit: int | None = None,
    input_template: str | None = None,
    chat_tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Problem]:
    """Read a JSONL file; prompts are made as OpenRLHF's ``PromptDataset`` makes them.

    Args:
        path: the file.
        input_key, label_key: where prompt and label stand.
        limit: number of problems from the start of the file; all if ``None``.
        input_template: a format string for the prompt, for instance ``"User: {}\\nAssistant: "``.
        chat_tokenizer: if given, its chat template is applied instead.

    Raises:
        ValueError: a line is not a JSON object or lacks a key, or the file holds no problem.
    """
    with Path(path).open(encoding="utf-8") as file:
        lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()][:limit]
    if not lines:
        raise ValueError(f"{path} holds no problem")
    rows = [_row(path, number, line, (input_key, label_key)) for number, line in lines]
    return [Problem(_prompt(row[input_key], input_template, chat_tokenizer), row[label_key]) for row in rows]


def _row(path: str | Path, number: int, line: str, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict) or (missing := [key for key in keys if key not in row]):
        present = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{path}, line {number}: needs the keys {missing if isinstance(row, dict) else keys}, "
                         f"has {present} (--input_key, --label_key)")  # fmt: skip
    return row


def _prompt(text: Any, template: str | None, chat_tokenizer: PreTrainedTokenizerBase | None) -> str:
    if chat_tokenizer is not None:
        chat = [{"role": "user", "content": text}] if isinstance(text, str) else text
        return str(chat_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    return template.format(text) if template else text
