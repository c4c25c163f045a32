"""No password of an address in what is shown, and the rest of the text as it was."""

from __future__ import annotations

import pytest

from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.redaction import lacks_a_secret, redact, redacted
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
    assert redacted({"a": [address, 1, None], "b": (0.5, True)}) == {"a": [hidden, 1, None], "b": [0.5, True]}


def test_secrets_in_a_query_are_hidden():
    assert redact("https://h/f?x=1&api_key=abc&y=2") == "https://h/f?x=1&api_key=(hidden)&y=2"
    assert redact("s3://b/k?X-Amz-Signature=abc,https://h/") == "s3://b/k?X-Amz-Signature=(hidden),https://h/"
    assert redact("x: \"https://h/f?token=abc\"  # 'https://h/?key=1'") == (
        "x: \"https://h/f?token=(hidden)\"  # 'https://h/?key=(hidden)'"
    )


@pytest.mark.parametrize("text", ["/runs/a@b/c", "org/name@0.5", "http://host:80/f?x=1", "mail me@host", "a//b", ""])
def test_what_has_no_password_stays(text):
    assert redact(text) == text and not lacks_a_secret(text)


def test_the_command_shows_no_password_and_takes_no_hidden_one(tmp_path, capsys):
    task = Task.make(tmp_path)
    address = "http://me:p@ss/w:o%40rd@grader:80/f"
    words = task.options("out", reward__remote_url=f"{address},{address}")
    capsys.readouterr()
    assert main([*words, "--dry_run"]) == 0
    shown = capsys.readouterr()
    hidden = "http://(hidden)@grader:80/f"
    assert "w:o" not in shown.out + shown.err
    (line,) = [line for line in shown.out.splitlines() if "remote_url:" in line and "grader" in line]
    assert f'remote_url: "{hidden},{hidden}"  # set: ' in line and "# something is hidden: put it in" in line
    assert main([*words, "--dry_run_json"]) == 0
    assert "w:o" not in (text := capsys.readouterr().out) and hidden in text
    assert main(task.options("out", reward__remote_url="ftp://me:p@ss/w:o%40rd@grader/f")) == 2
    refused = capsys.readouterr().err
    assert "got ftp://(hidden)@grader/f" in refused and "w:o" not in refused
    assert main(task.options("out", reward__remote_url=hidden)) == 2
    assert f"reward.remote_url must be a whole address: got {hidden}" in capsys.readouterr().err
