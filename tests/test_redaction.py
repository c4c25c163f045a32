"""No password of an address in what is shown, and the rest of the text as it was."""

from __future__ import annotations

import json
import logging

import pytest

from openrlhf_ext.cli.main import show
from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.redaction import RedactingFormatter, lacks_a_secret, printable, redact, redacted
from tests.e2e.jobs import Task

PASSWORDS = ("passw0rd", "p@ss", "a/b@c", "x:y", "p%40ss", "a,b", "a?b=c", "https://x")


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("scheme", ["http", "https", "s3", "redis"])
def test_the_user_and_password_of_an_address_are_hidden(password, scheme):
    address = f"{scheme}://me:{password}@host:80/f"
    hidden = f"{scheme}://(hidden)@host:80/f"
    assert redact(address) == hidden and lacks_a_secret(hidden) and not lacks_a_secret(address)
    assert redact(f"server {address} did not answer") == f"server {hidden} did not answer"
    assert redact(f"{address},{address},http://other/f") == f"{hidden},{hidden},http://other/f"
    assert redacted({"a": [address, 1, None], "b": (0.5, True)}) == {
        "a": [hidden, 1, None],
        "b": [0.5, True],
    }


def test_secrets_in_a_query_are_hidden():
    assert redact("https://h/f?x=1&api_key=abc&y=2") == "https://h/f?x=1&api_key=(hidden)&y=2"
    assert (
        redact("s3://b/k?X-Amz-Signature=abc,https://h/")
        == "s3://b/k?X-Amz-Signature=(hidden),https://h/"
    )
    assert redact("x: \"https://h/f?token=abc\"  # 'https://h/?key=1'") == (
        "x: \"https://h/f?token=(hidden)\"  # 'https://h/?key=(hidden)'"
    )


@pytest.mark.parametrize(
    "text", ["/runs/a@b/c", "org/name@0.5", "http://host:80/f?x=1", "mail me@host", "a//b", ""]
)
def test_what_has_no_password_stays(text):
    assert redact(text) == text and not lacks_a_secret(text)


def test_what_a_terminal_obeys_is_escaped(capsys):
    """And no line end, tab, letter or sign of any language."""
    clear, title, back = "\x1b[2J", "\x1b]0;title\x07", "a\rb\x08\x9b2J\u202e"
    plain = "日本語\u3000 é \t ½\n  🙂\u200d"
    assert printable(f"{plain}{clear}{title}{back}") == (
        f"{plain}\\x1b[2J\\x1b]0;title\\x07a\\rb\\x08\\x9b2J\\u202e"
    )
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "grading failed: %s", (clear,), None)
    assert RedactingFormatter().format(record) == "grading failed: \\x1b[2J"
    show(clear)
    assert capsys.readouterr().out == "\\x1b[2J\n"


def test_a_prompt_and_a_reward_function_cannot_drive_the_terminal(tmp_path, capfd):
    reward = (
        "def reward_func(queries, prompts, labels):\n    raise ValueError(queries[0] + "
        "'\x1b]0;raised\x07')\n"
    )
    task = Task.make(tmp_path, reward=reward)
    data = tmp_path / "escapes.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": f"\x1b[2J {n}+1=", "answer": "2"}) + "\n" for n in range(40)
        )
    )
    main([*task.options("out", data__prompt_dataset=data), "--dry_run"])
    told = capfd.readouterr()
    assert "\\x1b[2J" in told.out and "\\x1b]0;raised\\x07" in told.out
    assert not {"\x1b", "\x07"} & {*told.out, *told.err}


@pytest.mark.parametrize(
    "words",
    [
        ["--actor.adam.weight_decay", "x" * 100_000],
        ["--actor.optim", "x y " * 25_000],
        [f"--{'x' * 100_000}", "3"],
        ["--train.batch_size", "9" * 100_000],
        ["x" * 100_000],
        ["--config", "x" * 100_000],
        ["--actor.model_name_or_path", "x/" * 50_000],
        ["--data.prompt_dataset", "y" * 100_000],
    ],
)
def test_what_is_echoed_is_shortened(tmp_path, capfd, words):
    assert main([*Task.make(tmp_path).options("out"), *words, "--dry_run"]) == 2
    told = capfd.readouterr()
    assert "problem" in told.err and len(told.out + told.err) < 10_000


def test_the_command_shows_no_password_and_takes_no_hidden_one(tmp_path, capsys):
    task = Task.make(tmp_path)
    address = "http://me:p@ss/w:o%40rd@grader:80/f"
    words = task.options("out", reward__remote_url=f"{address},{address}")
    capsys.readouterr()
    assert main([*words, "--dry_run"]) == 0
    shown = capsys.readouterr()
    hidden = "http://(hidden)@grader:80/f"
    assert "w:o" not in shown.out + shown.err
    (line,) = [
        line for line in shown.out.splitlines() if "remote_url:" in line and "grader" in line
    ]
    assert (
        f'remote_url: "{hidden},{hidden}"  # set: ' in line
        and "# a value is hidden: fill it in" in line
    )
    assert main([*words, "--dry_run_json"]) == 0
    assert "w:o" not in (text := capsys.readouterr().out) and hidden in text
    assert main(task.options("out", reward__remote_url="ftp://me:p@ss/w:o%40rd@grader/f")) == 2
    refused = capsys.readouterr().err
    assert "got ftp://(hidden)@grader/f" in refused and "w:o" not in refused
    assert main(task.options("out", reward__remote_url=hidden)) == 2
    assert f"reward.remote_url must be a complete address: got {hidden}" in capsys.readouterr().err
