"""Several held-out sets by name: what each is sampled with, and what is refused."""

from __future__ import annotations

import pytest

from openrlhf_ext.driver.about import _evaluation

TWO = ("--eval.dataset", "aime24=train.jsonl,math500=b.jsonl,c.jsonl", "--eval.steps", "2")


@pytest.fixture(autouse=True)
def files(run_dir):
    for name in ("b.jsonl", "c.jsonl"):
        (run_dir / name).write_text((run_dir / "train.jsonl").read_text())
    (run_dir / "own.py").write_text((run_dir / "reward.py").read_text())


def test_one_file_is_one_set_without_a_name(load, run_dir):
    (own,) = load("--eval.dataset", "train.jsonl", "--eval.temperature", "1").eval.sets
    assert (own.name, own.paths, own.n_samples_per_prompt, own.temperature) == (
        "",
        f"{run_dir}/train.jsonl",
        4,
        1.0,
    )
    assert own.max_new_tokens is None and own.remote_url is None


def test_each_set_has_values_of_its_own_or_that_of_all(load, run_dir):
    config = load(
        *TWO,
        "--eval.n_samples_per_prompt",
        "aime24=32,math500=4",
        "--eval.temperature",
        "math500=0",
        "--eval.top_p",
        "0.7",
        "--eval.max_new_tokens",
        "aime24=12",
        "--eval.remote_url",
        "aime24=own.py",
    )
    first, second = config.eval.sets
    assert (first.name, first.paths) == ("aime24", f"{run_dir}/train.jsonl")
    assert (second.name, second.paths) == ("math500", f"{run_dir}/b.jsonl,{run_dir}/c.jsonl")
    assert (first.n_samples_per_prompt, first.temperature, first.top_p, first.max_new_tokens) == (
        32,
        0.6,
        0.7,
        12,
    )
    assert (
        second.n_samples_per_prompt,
        second.temperature,
        second.top_p,
        second.max_new_tokens,
    ) == (4, 0.0, 0.7, None)
    assert (first.remote_url, second.remote_url) == (f"{run_dir}/own.py", None)
    commands = _evaluation(config)
    assert (
        len(commands) == 2
        and f"--data {run_dir}/train.jsonl --reward {run_dir}/own.py" in commands[0]
    )
    assert all("--seed 42" in command for command in commands) and "--n 32" in commands[0]


def test_all_faults_are_in_one_report(problems):
    found = problems(
        "--eval.dataset",
        "a=train.jsonl,a=absent.jsonl",
        "--eval.temperature",
        "b=1",
        "--eval.top_p",
        "a=2",
        "--eval.remote_url",
        "a=nowhere.py",
    )
    text = "\n".join(found)
    assert "eval.top_p: expected number > 0 and <= 1, or NAME=VALUE,... by set, got a=2" in text
    assert "eval.dataset must use each name only once: got a twice" in text
    assert "eval.temperature must name sets of eval.dataset (a" in text and "got b in b=1" in text
    assert "absent.jsonl does not exist" in text and "nowhere.py" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--eval.dataset", "train.jsonl,b=b.jsonl"), "must give each of several sets a name"),
        (
            (*TWO, "--eval.top_p", "aime24=1,aime24=0.5"),
            "eval.top_p must give each set one value: got aime24 twice",
        ),
        (
            ("--eval.dataset", "train.jsonl", "--eval.n_samples_per_prompt", "a=2"),
            "(eval.dataset names none): got a",
        ),
        (
            (*TWO, "--eval.max_new_tokens", "aime24=100000"),
            "eval.max_new_tokens must be below data.max_len",
        ),
        (
            (*TWO, "--eval.async_enable"),
            "eval.async_enable needs engines that sample while the policy trains",
        ),
        ((*TWO, "--ckpt.best_metric_key", "eval/aime24/pass@8"), "must be one of eval/accuracy"),
        (("--ckpt.best_metric_key", "accuracy/mean"), "set ckpt.save_steps (1 = every step)"),
    ],
)
def test_what_does_not_fit_is_refused(problems, words, says):
    assert says in problems(*words)[0]


def test_the_best_checkpoint_may_be_that_of_a_set_or_of_training(load, problems):
    assert (
        load(*TWO, "--ckpt.best_metric_key", "eval/aime24/pass@4").ckpt.best_metric_key
        == "eval/aime24/pass@4"
    )
    load(
        "--ckpt.best_metric_key", "accuracy/mean", "--ckpt.save_steps", "1", "--ckpt.keep_best", "3"
    )
    streams = (*TWO, "--train.max_staleness", "1", "--eval.async_enable")
    assert load(*streams).eval.async_enable
    assert (
        "cannot be used together"
        in problems(*streams, "--ckpt.best_metric_key", "eval/accuracy")[0]
    )
