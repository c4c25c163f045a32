"""Papers' evaluations by name, through the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrlhf_ext.cli.evaluate import main
from openrlhf_ext.options import ConfigError
from openrlhf_ext.rewards.answers import answer_alone
from openrlhf_ext.tools.evaluate.problems import MATHS
from openrlhf_ext.tools.evaluate.request import Request, load_request
from tests.models import make_tiny_policy

TEXT = "<reasoning>\\boxed{1}</reasoning><answer>2</answer>\nAnswer: 3"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    make_tiny_policy(folder, chat_template=template)
    return folder


@pytest.fixture
def aime(tmp_path: Path) -> Path:
    path = tmp_path / "aime.jsonl"
    path.write_text('{"problem": "What is 1+1?", "answer": "2"}\n')
    return path


def asked(model: Path, aime: Path, *words: str) -> Request:
    return load_request([*words, "--model", str(model), "--benchmark", f"aime24={aime}"])


def test_the_conflict_protocol_is_table_1(model: Path, aime: Path) -> None:
    request = asked(model, aime, "--protocol", "conflict")
    given, (task,) = request.options, request.tasks
    assert (given.n_samples, given.temperature, given.top_p, given.max_new_tokens) == (
        64,
        1.0,
        1.0,
        1500,
    )
    assert (
        task.style.template == "{}"
        and task.style.chat
        and task.answers == "tagged"
        and task.reward == MATHS
    )
    assert (
        task.style.system_prompt is not None
        and "<answer> and </answer>" in task.style.system_prompt
    )
    assert (
        request.ks(given.n_samples) == [1, 2, 4, 8, 16, 32, 64]
        and request.protocol_note == "protocol conflict"
    )


def test_an_option_beside_a_protocol_wins_and_is_said(model: Path, aime: Path) -> None:
    words = (
        "--n",
        "8",
        "--temperature",
        "1",
        "--no-apply_chat_template",
        "--input_template",
        "Q: {}",
    )
    request = asked(model, aime, "--protocol", "entropy", *words)
    style = request.tasks[0].style
    assert request.options.n_samples == 8 and not style.chat and style.template == "Q: {}"
    note = request.protocol_note
    assert note.startswith("protocol entropy, but ") and "--n_samples 8 instead of 32" in note
    assert "--apply_chat_template False instead of True" in note and "--temperature" not in note


def test_without_a_protocol_everything_is_as_before(model: Path, aime: Path) -> None:
    request = asked(model, aime)
    assert (
        request.options.n_samples,
        request.options.temperature,
        request.options.max_new_tokens,
    ) == (4, 1.0, 1024)
    style = request.tasks[0].style
    assert style.template is not None and "\\boxed{{}}" in style.template and not style.chat
    assert request.tasks[0].answers == "any"


def test_the_forms_of_the_command_line_and_a_file_of_options(
    model: Path, aime: Path, tmp_path: Path
) -> None:
    """A second --benchmark adds to the first, another name and the beginning of a name are that
    option."""
    (tmp_path / "evaluate.yaml").write_text(
        "temperature: 0.5\ntop_p: 0.5\nk: [1, 2]\napply_chat_template: true\n"
    )
    words = [
        "--config",
        str(tmp_path / "evaluate.yaml"),
        "--n=8",
        "--temp",
        "0.25",
        "--json",
        "o.json",
    ]
    words.append("--no-apply_chat_template")
    options = asked(model, aime, *words, "--benchmark", f"amc23={aime}").options
    assert options.benchmark == (f"amc23={aime}", f"aime24={aime}") and options.k == (1, 2)
    assert not options.apply_chat_template
    assert (options.n_samples, options.temperature, options.top_p, options.json_file) == (
        8,
        0.25,
        0.5,
        "o.json",
    )
    with pytest.raises(ConfigError, match="unknown option engin_e.*did you mean engine"):
        asked(model, aime, "--engin_e", "vllm")
    with pytest.raises(ConfigError, match="unknown option e "):
        asked(model, aime, "--e")  # --engine, --engine_timeout_s, ...


@pytest.mark.parametrize(
    ("where", "alone"),
    [("any", TEXT), ("tagged", "<answer>2</answer>"), ("line", "<answer>3</answer>")],
)
def test_the_answer_stands_where_the_protocol_says(where: str, alone: str) -> None:
    assert answer_alone(TEXT, where) == alone
    assert answer_alone("\\boxed{1}", where) == ("\\boxed{1}" if where == "any" else "")


def test_saved_completions_are_graded_by_the_protocols_answer(
    aime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.jsonl"
    saved.write_text(
        json.dumps(
            {"problem": 0, "completions": ["\\boxed{2}", TEXT, "Answer: 2", "<answer>3</answer>"]}
        )
    )
    found = {}
    for protocol in (None, "conflict", "entropy"):
        out = tmp_path / str(protocol)
        words = [
            "--completions",
            str(saved),
            "--benchmark",
            f"aime24={aime}",
            "--num_workers",
            "1",
            "--out",
            str(out),
        ]
        assert main([*words, *(["--protocol", protocol] if protocol else [])]) == 0
        (result,) = json.loads((out / "results.json").read_text())
        found[protocol] = result["accuracy"], result["majority_at_k"]["4"]
    # two state 2; two tagged answers, one of them 2; two lines, of which TEXT's says 3
    assert found == {None: (0.5, 1.0), "conflict": (0.25, 0.5), "entropy": (0.25, 0.5)}
    assert "protocol entropy" in capsys.readouterr().out


def test_a_protocol_runs_and_is_listed(
    model: Path, aime: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--n",
        "2",
        "--max_new_tokens",
        "4",
        "--num_workers",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert (
        main(
            [
                "--protocol",
                "conflict",
                "--model",
                str(model),
                "--benchmark",
                f"aime24={aime}",
                *small,
            ]
        )
        == 0
    )
    assert "protocol conflict, but --n_samples 2 instead of 64" in capsys.readouterr().out
    (line,) = [
        json.loads(line) for line in (tmp_path / "out/aime24.jsonl").read_text().splitlines()[1:]
    ]
    assert (
        "helpful assistant for solving math" in line["prompt"]
        and line["prompt"].count("What is 1+1?") == 1
    )
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "conflict: Simoni et al." in shown and "--n_samples 64" in shown
