"""Every command in README and docs says in a comment above it who runs it; those marked
``run here`` run here.

<!-- run here -->                  by this test, in a folder with a small model, data and the
repository's examples <!-- run here, as a dry run -->    the same with --dry_run behind it
<!-- run by tests/FILE.py -->      by another test
<!-- checked by tests/FILE.py -->  its words are, by another test; it takes too long to run
<!-- needs GPUs -->, <!-- needs a network -->, <!-- needs Slurm --> ...   by nobody here
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.cli.main import main
from tests.models import CHAT_TEMPLATE
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```bash\n(?P<text>.*?)^```", re.DOTALL | re.MULTILINE
)
ELSEWHERE = re.compile(r"(?:run|checked) by (tests/[\w/]+\.(?:py|sh))|needs [\w ,]+")
MODEL = {
    "model_type": "qwen2", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 99,
    "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 32768,
}  # fmt: skip
# what stands for the reader's own files
YOURS = {
    "OpenRLHF/Llama-3-8b-sft-mixture": "chat_model", "OpenRLHF/prompt-collection-v0.1": "chats.jsonl",
    "/openrlhf/examples/python/reward_func.py": "reward.py", "/openrlhf/examples/test_scripts": "out",
    "/path/to/qwen2.5-7b": "model", "/models/Qwen2.5-7B-Instruct": "model", "/models/my-reward-model": "model",
    "my_reward.py": "reward.py",
}  # fmt: skip


def _place(value: str | None) -> str:
    return value if value and re.fullmatch(r"[\w./]+:\d+", value) else ""


def blocks() -> list[tuple[str, str | None, str]]:
    """(place, mark, commands) of every block."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text[: match.start("text")].count("\n") + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match["mark"], match["text"]))
    return found


HERE = [block for block in blocks() if (block[1] or "").startswith("run here")]


@pytest.mark.parametrize(("place", "mark", "text"), blocks(), ids=_place)
def test_every_block_of_commands_says_who_runs_it(place, mark, text):
    assert mark is not None, f"{place}: no comment above says who runs this"
    if mark in ("run here", "run here, as a dry run"):
        return
    match = ELSEWHERE.fullmatch(mark)
    assert match, f"{place}: {mark}"
    if match[1] is None:
        return
    source, page = (ROOT / match[1]).read_text(), Path(place.partition(":")[0])
    named = re.findall(
        r"(?:examples/scripts|tests)/\w+\.sh|openrlhf_ext\.cli\.\w+|openrlhf-ext \w+", text
    )
    words = [re.split(r"[./ ]", name)[-1 - name.endswith(".sh")] for name in named]
    assert page.name in source or any(word in source for word in words), (
        f"{place}: {match[1]} names neither {page.name} nor any of {named}"
    )


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a reader might type: a model, problem files, a reward function, a YAML
    file."""
    desk = tmp_path_factory.mktemp("desk")
    for name in ("examples", "configs", "tests", "benchmarks", "openrlhf_ext"):
        (desk / name).symlink_to(ROOT / name)
    (desk / "model").mkdir()
    (desk / "model/config.json").write_text(json.dumps(MODEL))
    shutil.copytree(desk / "model", desk / "chat_model")
    (desk / "chat_model/chat_template.jinja").write_text(CHAT_TEMPLATE)
    chats = (
        {"context_messages": [{"role": "user", "content": f"How many are {i} and 1?"}]}
        for i in range(128)
    )
    (desk / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (desk / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n    return {'rewards': 0.0}\n"
    )
    record = {"question": "How many are 1 and 1?", "answer": "They are 2.\n#### 2"}
    (desk / "gsm8k").mkdir()
    (desk / "gsm8k/test.jsonl").write_text(json.dumps(record | {"question": "And 2 and 2?"}) + "\n")
    for file in ("gsm8k/train.jsonl", "prompts.jsonl"):
        lines = [json.dumps(record | {"question": f"How many are {i} and 1?"}) for i in range(2048)]
        (desk / file).write_text("\n".join(lines) + "\n")
    (desk / "run.yaml").write_text(
        "actor: {model_name_or_path: model, num_gpus_per_node: 8}\n"
        "megatron: {tensor_parallel_size: 2}\n"
        "data: {prompt_dataset: prompts.jsonl, input_key: question, label_key: answer}\n"
        "reward: {remote_url: reward.py}\n"
        "rollout: {batch_size: 32, n_samples_per_prompt: 4, max_new_tokens: 256}\n"
        "train: {batch_size: 128}\n"
    )
    return desk


@pytest.mark.parametrize(("place", "mark", "text"), HERE, ids=_place)
def test_commands_do_what_the_page_says(desk, monkeypatch, capfd, place, mark, text):
    monkeypatch.chdir(desk)
    for name, here in YOURS.items():
        text = text.replace(name, here)
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if mark.endswith("dry run") and words:
            words.append("--dry_run")
        if words:
            assert run(words) == 0, f"{place}: {line}\n{capfd.readouterr().err[-3000:]}"


def run(words: list[str]) -> int:
    """The exit status. Commands of the package run in this process, which has imported what they
    need."""
    if words[0] == "openrlhf-ext":
        return main(words[1:])
    if words[:2] == ["python", "-m"] and words[2].startswith("openrlhf_ext.cli."):
        return importlib.import_module(words[2]).main(words[3:])
    assert words[0] in ("python", "bash"), words
    program = [sys.executable, *words[1:]] if words[0] == "python" else words
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENRLHF_EXT_VENV": str(Path(sys.prefix))}
    return subprocess.run(program, env=environment, timeout=PATIENCE_S).returncode
