from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openrlhf_ext.algorithms import algorithm_names, with_published_values
from openrlhf_ext.cli.explain import main, parse_options
from openrlhf_ext.tools.explain.quantities import explain
from openrlhf_ext.tools.explain.rollouts import read_rollouts
from tests.patience import PATIENCE_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "data" / "explain_rollouts.jsonl"


def completion(
    tokens: list[str], reward: float, entropies: list[float], **more: Any
) -> dict[str, Any]:
    return {
        "group": 7,
        "prompt": "1+1=",
        "tokens": tokens,
        "token_ids": [sum(map(ord, token)) for token in tokens],
        "reward": reward,
        "logprobs": [-0.5] * len(tokens),
        "entropies": entropies,
        **more,
    }


def write(folder: Path, *records: Any) -> str:
    path = folder / "rollouts.jsonl"
    path.write_text("\n\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 0
    return capsys.readouterr().out.splitlines()


# --- the numbers
# --------------------------------------------------------------------------------------------------


def test_gtpo_entropy_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares 0.5 and 1.5 of two correct tokens: R+ = 1.05, 1.15; pools {1.05, 1.15, 0} and {0, 0,
    -1.1}."""
    path = write(
        tmp_path,
        completion(["2"], 1, [1.0]),
        completion(["two"], 1, [3.0]),
        completion(["3"], 0, [0.7]),
    )
    lines = shown(capsys, "--algorithm", "gtpo_entropy", "--rollouts", path)
    assert lines[0] == "gtpo_entropy, group 7  (alpha1=1.0, alpha2=0.1)"
    assert "1 ✓ reward 1, correct, 1 token, mean entropy 1.000" in lines
    assert "3 ✗ reward 0, wrong, 1 token, mean entropy 0.700" in lines
    assert panel(lines, "entropy") == [["1.00"], ["3.00"], ["0.70"]]
    assert panel(lines, "shaped reward") == [["+1.05"], ["+1.15"], ["-1.10"]]
    assert panel(lines, "advantage") == [["+0.61"], ["+0.80"], ["-1.41"]]
    assert panel(lines, "update") == []


def test_gtpo_conflict_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A = +-0.71; the first token is a forward conflict, the last a backward one."""
    path = write(
        tmp_path,
        completion(["a", "b", "c"], 1, [0, 0, 0]),
        completion(["a", "d", "c"], 0, [0, 0, 0]),
    )
    lines = shown(capsys, "--algorithm", "gtpo_conflict", "--rollouts", path)
    assert panel(lines, "lambda") == [["2", "1", "2"], ["0", "1", "0"]]
    assert panel(lines, "advantage") == [["+0.71"] * 3, ["-0.71"] * 3]
    assert panel(lines, "update") == [["+1.41", "+0.71", "+1.41"], ["0", "-0.71", "0"]]


def test_the_update_shows_what_aggregation_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean over completions gives a token of a short one more weight: 4 tokens / (2 completions x
    1 or 3 tokens)."""
    path = write(tmp_path, completion(["a"], 1, [0]), completion(["b", "c", "d"], 0, [0, 0, 0]))
    lines = shown(capsys, "--algorithm", "grpo", "--rollouts", path)
    assert panel(lines, "update") == [["+1.41"], ["-0.47"] * 3]
    lines = shown(
        capsys,
        "--algorithm",
        "dr_grpo",
        "--option",
        "agg=seq-mean-token-sum-norm",
        "--rollouts",
        path,
    )
    assert "l_norm=3" in lines[0]
    assert panel(lines, "update") == [["+0.33"], ["-0.33"] * 3]


def panel(lines: list[str], name: str) -> list[list[str]]:
    """The column of that name in the table of each completion."""
    found: list[list[str]] = []
    spans: dict[str, slice] = {}
    for line in lines:
        if line.strip().startswith("#"):
            cells = [*re.finditer(r" *\S+(?: \S+)*", line)]
            spans = {cell[0].strip(): slice(*cell.span()) for cell in cells}
            found += [[]] if name in spans else []
        elif name in spans and line:
            found[-1].append(line[spans[name]].strip())
        else:
            spans = {}
    return found


def test_every_method_explains_every_group_of_the_example() -> None:
    rollouts = read_rollouts(EXAMPLE)
    for name in algorithm_names():
        # need the values of a critic, a guide's log-probs
        if name in ("gae", "on_policy_distillation"):
            continue
        for group in ("1", "2"):
            explanation = explain(rollouts, name, {}, group)
            assert [quantity.name for quantity in explanation.quantities][0] == "entropy"
            assert "advantage" in [quantity.name for quantity in explanation.quantities]
    assert "EXPERIMENTAL" in explain(rollouts, "mixed_policy_dapo", {}).notes[0]


def test_what_happens_to_whole_completions_and_groups_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(
        capsys, "--algorithm", "gtpo_conflict", "--rollouts", str(EXAMPLE), "--group", "2"
    )
    assert any("truncated, removed by the entropy filter" in line for line in lines)
    path = write(tmp_path, completion(["a"], 1, [0.1]), completion(["b"], 1, [0.1]))
    assert any(
        "dropped from the batch" in line
        for line in shown(capsys, "--algorithm", "dapo", "--rollouts", path)
    )
    assert any(
        "teaches nothing" in line
        for line in shown(capsys, "--algorithm", "grpo", "--rollouts", path)
    )


def test_the_output_in_the_documentation_is_what_one_sees(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (EXAMPLE.parents[2] / "docs" / "explain.md").read_text()
    (block,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    arguments = ["--algorithm", "gtpo_conflict", "--rollouts", str(EXAMPLE), "--group", "2"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    for part in block.rstrip("\n").split("...\n"):
        assert part in output


def test_the_file_is_one_batch(tmp_path: Path) -> None:
    records = [completion(["a"], 1, [1.0]), completion(["b"], 0, [1.0])]
    other = [{**record, "group": "x", "entropies": [9.0]} for record in records]
    rollouts = read_rollouts(Path(write(tmp_path, *records, *other)))
    shares = [
        explain(rollouts, "high_entropy_tokens", {"top_rho": 0.5}, group) for group in ("7", "x")
    ]
    assert [explanation.quantities[1].values for explanation in shares] == [
        ((0.0,), (0.0,)),
        ((1.0,), (1.0,)),
    ]


def test_what_the_environment_wrote_is_shown_without_numbers_and_counts_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = completion(["b"], 0, [1.0])
    with_environment = completion(
        ["a", "env", "c"], 1, [1.0, 0.0, 2.0], environment=[0, 1, 0], label="5"
    )
    path = write(tmp_path, with_environment, other)
    lines = shown(capsys, "--algorithm", "gtpo_entropy", "--rollouts", path)
    assert "1 ✓ reward 1, correct, 2 tokens and 1 of the environment, mean entropy 1.500" in lines
    assert panel(lines, "entropy")[0] == ["1.00", "", "2.00"]
    (tmp_path / "alone").mkdir()
    alone = write(tmp_path / "alone", completion(["a", "c"], 1, [1.0, 2.0]), other)
    same = shown(capsys, "--algorithm", "gtpo_entropy", "--rollouts", alone)
    for name in ("advantage", "shaped reward"):
        assert panel(lines, name)[0][::2] == panel(same, name)[0]


def test_options() -> None:
    assert parse_options(["a=1.5", "b=row", "c=null", 'd={"kind": "grop"}', "e=true", "f=x=y"]) == {
        "a": 1.5,
        "b": "row",
        "c": None,
        "d": {"kind": "grop"},
        "e": True,
        "f": "x=y",
    }
    assert with_published_values("grpo_s", {"beta2": 0.3}, max_length=9) == {
        "beta1": 1.0,
        "beta2": 0.3,
    }
    assert with_published_values("gtpo_entropy", {"version": "v1"}, max_length=9) == {
        "version": "v1"
    }
    assert with_published_values("dr_grpo", {"agg": "token-mean"}, max_length=9) == {
        "agg": "token-mean"
    }


# --- mistakes
# --------------------------------------------------------------------------------------------------

GOOD = completion(["a", "b"], 1, [0.1, 0.2])


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ("{", "line 3: not JSON ("),
        ("[1]", "line 3: must be a JSON object, got a list"),
        (
            {key: value for key, value in GOOD.items() if key != "reward"},
            "line 3: needs reward, has 'group', 'prompt'",
        ),
        ({**GOOD, "entropy": [1, 2]}, "line 3: unknown key 'entropy'; did you mean entropies?"),
        ({**GOOD, "logprobs": [-1]}, "line 3: logprobs has 1 entries, tokens has 2"),
        ({**GOOD, "logprobs": [-1, 0.5]}, "line 3: logprobs[1] must be a log-probability"),
        (
            {**GOOD, "entropies": [0.1, float("nan")]},
            "line 3: not JSON that can be read: NaN is no number of JSON",
        ),
        ({**GOOD, "entropies": [0.1, -0.1]}, "line 3: entropies[1] must be an entropy in nats"),
        ({**GOOD, "entropies": 0.1}, "line 3: entropies must be a list"),
        ({**GOOD, "token_ids": [1, True]}, "line 3: token_ids[1] must be an integer, got True"),
        ({**GOOD, "environment": [0, 2]}, "line 3: environment[1] must be 0 or 1"),
        ({**GOOD, "environment": [1, 1]}, "line 3: environment is 1 everywhere"),
        (
            {**GOOD, "tokens": "ab"},
            "line 3: tokens must be a list with one entry per token, got 'ab'",
        ),
        (completion([], 1, []), "line 3: tokens is empty"),
        ({**GOOD, "reward": "1"}, "line 3: reward must be a finite number, got '1'"),
        ({**GOOD, "truncated": 0}, "line 3: truncated must be true or false, got 0"),
        (
            {**GOOD, "reward": "1", "step": 0.5},
            "reward must be a finite number, got '1'; step must be an integer, got 0.5",
        ),
        ({**GOOD, "group": 1.5}, "line 3: group must be a text or an integer, got 1.5"),
        ({**GOOD, "prompt": "2+2="}, "line 3: prompt differs from that of line 1"),
        ({**GOOD, "values": [0, 0]}, "values is on line 3 and missing on line 1"),
    ],
)
def test_a_bad_line_is_named(
    record: Any, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--algorithm", "grpo", "--rollouts", write(tmp_path, GOOD, record)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--algorithm", "gtpo"], "gtpo_entropy and gtpo_conflict"),
        (["--algorithm", "grpo_x"], "did you mean"),
        (["--algorithm", "grpo", "--option", "adv_ep=1"], "did you mean 'adv_eps'"),
        (["--algorithm", "grpo", "--option", "adv_eps"], "--option takes KEY=VALUE, got 'adv_eps'"),
        (
            ["--algorithm", "grpo", "--option", "adv_eps=1", "adv_eps=2"],
            "--option adv_eps is given twice",
        ),
        (
            ["--algorithm", "grpo", "--group", "9"],
            "--group '9' is not in the file; its groups are 1, 2",
        ),
        (["--algorithm", "grpo", "--rollouts", "none.jsonl"], "none.jsonl"),
        (["--algorithm", "grpo", "--option", "kl_coef=0.1"], "ref_logprobs"),
        (["--algorithm", "gae"], "values"),
    ],
)
def test_mistakes_exit_with_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--rollouts", str(EXAMPLE), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_an_empty_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--algorithm", "grpo", "--rollouts", write(tmp_path, "")]) == 2
    assert "holds no completion" in capsys.readouterr().err


def test_a_binary_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"ab\xff")
    assert main(["--algorithm", "grpo", "--rollouts", str(tmp_path / "a.jsonl")]) == 2
    assert "a.jsonl is not UTF-8 text: invalid start byte at byte 2" in capsys.readouterr().err


def test_a_reader_that_leaves_early_and_an_ascii_terminal() -> None:
    command = [
        sys.executable,
        "-m",
        "openrlhf_ext.cli.explain",
        "--algorithm",
        "dapo",
        "--rollouts",
        str(EXAMPLE),
    ]
    piped = f"set -o pipefail; PYTHONIOENCODING=ascii {' '.join(command)} | head -n 14"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 ? reward 1, correct" in done.stdout


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({**GOOD, "tokens": ["\u2028", "\x85"]}, ensure_ascii=False))
    assert read_rollouts(path)[0].record["tokens"] == ["\u2028", "\x85"]


def test_help_is_quick_and_needs_no_torch() -> None:
    program = (
        "import sys; from openrlhf_ext.cli import explain; print({'torch', 'matplotlib'} & "
        "set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert output.stdout.strip() == "set()"
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
