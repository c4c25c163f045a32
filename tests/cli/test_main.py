"""`openrlhf-ext`: one command for all, words that are close, and no word of the libraries."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext import __version__
from openrlhf_ext.cli.main import _COMMANDS, main, silence_libraries
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_alone_it_lists_every_command_and_each_says_its_own_name(capsys):
    assert main([]) == main(["--help"]) == 0
    listed = capsys.readouterr().out
    commands = {
        path.stem
        for path in (ROOT / "openrlhf_ext/cli").glob("*.py")
        if "\ndef main(" in path.read_text()
    }
    assert {module for module, _ in _COMMANDS.values()} == commands - {"main"}
    for name in _COMMANDS:
        assert f"\n  {name} " in listed
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and capsys.readouterr().out.startswith(
            f"usage: openrlhf-ext {name} "
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "openrlhf-ext: no command 'trian'; did you mean train?"),
        (["--versoin"], "openrlhf-ext: no command '--versoin'; did you mean --version?"),
        (["xyz"], "openrlhf-ext: no command 'xyz'; commands: train, train_sft, plan, "),
        (
            ["explain", "--algoritm", "grpo"],
            "openrlhf-ext explain: unknown option --algoritm; did you mean --algorithm?",
        ),
        (["evaluate", "--engine", "vlm"], "got vlm (command line); did you mean vllm?"),
        (
            ["plan", "--response_tokns", "8"],
            "unknown option --response_tokns; did you mean --response_tokens?",
        ),
        (
            ["plan", "--actor.adm.lr", "8"],
            "unknown option actor.adm.lr (command line); did you mean actor.adam.lr?",
        ),
        (
            ["plan", "--gpu", "H10", "--actor.model_name_or_path", "configs/models/qwen2.5-7b"],
            "did you mean H100?",
        ),
        (["plan", "--actor.model_name_or_path", "configs/models/qwen2.5-7c"], "qwen2.5-7b?"),
        (
            ["plan", "--config", "configs/recipes/gsm8k_grop.yaml"],
            "did you mean configs/recipes/gsm8k_grpo.yaml?",
        ),
        (
            [
                "plan",
                "--config",
                "configs/recipes/gsm8k_grpo.yaml",
                "--algo.advantage.estimator",
                "gpro",
            ],
            "mean grpo?",
        ),
        (
            ["convert", "--check", "configs/models/qwen2.5-7c"],
            "did you mean configs/models/qwen2.5-7b?",
        ),
        (
            [
                "explain",
                "--algorithm",
                "dpao",
                "--rollouts",
                "examples/data/explain_rollouts.jsonl",
            ],
            "mean 'dapo'?",
        ),
        (["report", "config"], "there is no such folder; did you mean configs?"),
        (
            ["evaluate", "--completions", "x", "--benchmark", "gsm9k=x"],
            "no benchmark 'gsm9k'; did you mean gsm8k?",
        ),
        (["doctor", "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["report", "run", "--zzz"], "unknown option --zzz; --help lists all options"),
        (["train", "--help", "trian"], "no option matches; did you mean train?"),
    ],
)
def test_a_word_that_is_close_is_offered_and_the_status_is_2(words, said, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and said in capsys.readouterr().err


def test_both_ways_to_call_it_print_the_version():
    command = Path(sys.executable).with_name("openrlhf-ext")
    for words in ([command], [sys.executable, "-m", "openrlhf_ext"]):
        done = subprocess.run(
            [*words, "--version"], capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (done.returncode, done.stdout) == (0, f"openrlhf_ext {__version__}\n"), done.stderr


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    def broken(argv):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr("openrlhf_ext.cli.plan.main", broken)
    with (
        Path("/dev/null").open("w") as nothing,
        pytest.raises(BrokenPipeError, match="of a worker"),
    ):
        monkeypatch.setattr(sys, "stdout", nothing)
        main(["plan"])


@pytest.mark.parametrize("words", [["train", "--help", "adam"], ["--help"], ["--version"]])
def test_a_reader_that_has_read_enough_gets_no_traceback(words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "openrlhf_ext", *words]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_warnings_of_a_library_that_sets_its_own_level_are_not_shown(capfd):
    silence_libraries()
    log = logging.getLogger("DeepSpeed")
    log.addHandler(handler := logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)  # as its import does
    log.warning("Setting accelerator to CPU.")
    log.error("broken")
    log.removeHandler(handler)
    told = capfd.readouterr()
    assert "accelerator" not in told.out + told.err and "broken" in told.out
