from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path

import pytest
import torch
import toy_policy
import toy_task
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.patience import PATIENCE_S

SHORT = toy_policy.PolicySettings(knowledge_steps=36, careless_steps=2)
TOKENIZER = toy_policy.build_tokenizer()


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str, str]:
    """A folder, the words by which the command was called there, and what it printed on both
    streams."""
    folder = tmp_path_factory.mktemp("toy")
    given = {
        "output_dir": folder / "policy",
        "data_dir": folder / "data",
        "cache_dir": folder / "cache",
        "threads": 1,
    }
    given |= {"knowledge_steps": SHORT.knowledge_steps, "careless_steps": SHORT.careless_steps}
    given |= {"train_size": 20, "heldout_size": 8}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR"):
            # the command sets them; this restores them
            patch.setenv(name, os.environ.get(name, ""))
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
            toy_policy.main(words)
    return folder, words, out.getvalue(), error.getvalue()


@pytest.fixture(scope="module")
def short_policy(command: tuple[Path, list[str], str, str]) -> Path:
    """In the command's cache."""
    return command[0] / "cache" / f"toy_policy-{toy_policy.cache_key(SHORT)}"


@given(text=st.text())
def test_any_text_survives_the_tokenizer_up_to_composed_accents(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == unicodedata.normalize("NFC", text)


def test_digits_and_tags_are_single_tokens() -> None:
    solution = toy_task.Problem(3, (("*", 4), ("+", 2))).solution
    pieces = TOKENIZER.convert_ids_to_tokens(
        TOKENIZER(solution.completion + toy_policy.EOS)["input_ids"]
    )
    reasoning = ["3", "*", "4", "=", "1", "2", ";", "1", "2", "+", "2", "=", "1", "4"]
    answer = ["<answer>", "1", "4", "</answer>", "<|im_end|>"]
    assert pieces == ["<reasoning>", *reasoning, "</reasoning>", *answer]


def test_tags_survive_decoding_without_special_tokens() -> None:
    ids = TOKENIZER("<reasoning>1+1=2</reasoning><answer>2</answer><|im_end|><|endoftext|>")[
        "input_ids"
    ]
    assert (
        TOKENIZER.decode(ids, skip_special_tokens=True)
        == "<reasoning>1+1=2</reasoning><answer>2</answer>"
    )


def test_the_chat_template_adds_nothing_to_a_question() -> None:
    chat = [{"role": "user", "content": "1+1=?"}]
    assert (
        TOKENIZER.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "1+1=?"
    )


def test_transformers_loads_the_saved_policy_with_the_same_vocabulary(short_policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(short_policy)
    tokenizer = AutoTokenizer.from_pretrained(short_policy)
    assert model.dtype == torch.float32
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert (
        len(tokenizer)
        == model.config.vocab_size
        == model.get_input_embeddings().num_embeddings
        == 263
    )
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.padding_side == TOKENIZER.padding_side
    assert (model.config.pad_token_id, model.config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    assert tokenizer.chat_template == TOKENIZER.chat_template


def test_default_architecture_suits_tensor_and_pipeline_parallel_ranks() -> None:
    model = toy_policy.build_model(toy_policy.PolicySettings(), TOKENIZER)
    config = model.config
    # the smallest that vLLM has on CPU
    assert config.hidden_size // config.num_attention_heads == 32
    assert config.num_key_value_heads % 2 == config.num_hidden_layers % 2 == 0
    assert 0.5e6 < model.num_parameters() < 1.5e6
    assert config.max_position_embeddings >= 2048


def test_the_warm_start_is_two_supervised_runs_and_lowers_the_loss(short_policy: Path) -> None:
    losses = json.loads((short_policy / toy_policy.MARKER).read_text())["losses"]
    assert list(losses) == ["careful", "careless"]
    assert (
        losses["careful"][1] < 0.6 * losses["careful"][0]
        and losses["careless"][0] < 0.6 * losses["careful"][0]
    )


def test_the_careless_teacher_errs_at_the_given_rate_and_goes_on_from_the_error() -> None:
    rng = random.Random(0)
    errors = []
    steps = 0
    for problem in islice(toy_task.problem_stream(0, "train"), 2000):
        solution = toy_policy.careless_solution(problem, rng, 0.3, slips=(-10, -1, 1))
        value = problem.first
        for (operator, operand), step in zip(problem.operations, solution.steps, strict=True):
            left, right = step.split("=")
            assert left == f"{value}{operator}{operand}"
            if error := int(right) - toy_task.apply(operator, value, operand):
                errors.append(error)
            value, steps = int(right), steps + 1
        assert solution.answer == value
    assert len(errors) / steps == pytest.approx(0.3, abs=0.03)
    assert {*errors} == {-10, -1, 1}


def test_the_careful_teacher_of_the_quickstart_errs_seldom_and_that_of_the_studies_never() -> None:
    for family, share in (("chain", 0.1), ("fork", 0.0), ("tags", 0.0)):
        settings = toy_policy.family_settings(family)
        steps = []
        for _, text in islice(toy_policy._examples(settings), 2000):
            parts = re.search(r"<reasoning>(.*)</reasoning>", text)[1].split(";")
            steps += [
                eval(left) == int(right)
                for left, right in (part.split("=") for part in parts if part)
            ]
        assert 1 - sum(steps) / len(steps) == pytest.approx(share, abs=0.02 if share else 0), family


# The studies' records (benchmarks/results) name policies of these completions: other ones make
# other policies.
@pytest.mark.parametrize(
    ("family", "digest"),
    [
        ("fork", "e1be2b17047074f2"),
        ("fork_frequent", "5ad9f9cbda69b06f"),
        ("tags", "530121e5c29efef9"),
        ("fork_equal", "c733f8de83fe3f9b"),
        ("fork_short", "5a61e3e860f150fd"),
    ],
)
def test_the_completions_of_the_studies_families_stay_as_they_are(family: str, digest: str) -> None:
    settings = toy_policy.family_settings(family, shift=True, seed=3)
    count = settings.careful_completions + settings.careless_completions
    found = hashlib.sha256()
    for problem, text in islice(toy_policy._examples(settings), count):
        found.update(f"{problem.question}{text}".encode())
    assert found.hexdigest()[:16] == digest


def test_a_careless_teacher_without_slips_is_correct() -> None:
    problem = toy_task.Problem(3, (("*", 4), ("-", 5)))
    assert toy_policy.careless_solution(problem, random.Random(0), 0.0) == problem.solution


def test_accuracy_is_that_of_the_graded_samples(
    short_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = list(islice(toy_task.problem_stream(0, "heldout"), 4))
    model = AutoModelForCausalLM.from_pretrained(short_policy)
    assert toy_policy.sampled_accuracy(model, TOKENIZER, problems) == 0.0
    right = {problem.question: problem.solution.completion for problem in problems[:3]}
    monkeypatch.setattr(
        toy_policy, "_complete", lambda m, t, ps, greedy: [right.get(p.question, "?") for p in ps]
    )
    assert toy_policy.sampled_accuracy(model, TOKENIZER, problems) == 0.75


def test_a_second_call_trains_nothing(short_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_policy, "_train_into", lambda *_: pytest.fail("trained again"))
    assert toy_policy.cached_policy(short_policy.parent, SHORT) == short_policy
    assert toy_policy.cache_key(SHORT) != toy_policy.cache_key(toy_policy.PolicySettings())


def test_an_interrupted_training_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path, *_: object) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(toy_policy, "_train_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        toy_policy.cached_policy(tmp_path, SHORT)
    assert list(tmp_path.iterdir()) == []


def test_losing_the_race_for_the_cache_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_while_another_finishes(draft: Path, *_: object) -> None:
        for folder in (draft, tmp_path / f"toy_policy-{toy_policy.cache_key(SHORT)}"):
            folder.mkdir()
            (folder / toy_policy.MARKER).write_text("{}")

    monkeypatch.setattr(toy_policy, "_train_into", train_while_another_finishes)
    assert (toy_policy.cached_policy(tmp_path, SHORT) / toy_policy.MARKER).is_file()


def test_copies_replace_toy_policies_but_nothing_else(short_policy: Path, tmp_path: Path) -> None:
    for _ in range(2):
        toy_policy.copy_policy(short_policy, tmp_path / "policy")
    assert (tmp_path / "policy" / "model.safetensors").is_file()
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="thesis|papers"):
        toy_policy.copy_policy(short_policy, tmp_path / "papers")
    assert (tmp_path / "papers" / "thesis.tex").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["papers", "policy"]


def test_the_command_writes_policy_and_problems_and_needs_no_torch_the_second_time(
    command: tuple[Path, list[str], str, str],
) -> None:
    folder, words, out, error = command
    assert "held-out accuracy" in out and error == "" and "WARNING" not in out, "only its own words"
    assert json.loads((folder / "policy" / toy_policy.MARKER).read_text())["parameters"] == 855_936
    assert len((folder / "data/train.jsonl").read_text().splitlines()) == 20
    assert len((folder / "data/heldout.jsonl").read_text().splitlines()) == 8
    code = (
        "import sys; sys.modules['torch'] = None; import toy_policy; toy_policy.main(sys.argv[1:])"
    )
    examples = Path(toy_policy.__file__).parent
    subprocess.run(
        [sys.executable, "-c", code, *words], cwd=examples, check=True, timeout=PATIENCE_S
    )


def test_real_questions_fit(shared_data: Path) -> None:
    with (shared_data / "gsm8k" / "train.jsonl").open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line in lines]
    lengths = [len(ids) for ids in TOKENIZER(questions)["input_ids"]]
    assert max(lengths) < toy_policy.PolicySettings().max_positions - toy_policy.MAX_NEW_TOKENS
    sample = questions[::50]
    decoded = TOKENIZER.batch_decode(TOKENIZER(sample)["input_ids"])
    assert decoded == [unicodedata.normalize("NFC", question) for question in sample]
