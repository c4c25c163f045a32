"""What a run says at its end; of one that has ended by itself see tests/e2e/test_run_folder.py."""

from __future__ import annotations

from pathlib import Path

from openrlhf_ext.config import RunConfig
from openrlhf_ext.driver.about import last_words, results
from openrlhf_ext.reporting import MetricsWriter


def run_of(folder: Path, rewards: int) -> RunConfig:
    """Rewards 0.1, 0.2, ... and one evaluation."""
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write(0, {"eval/accuracy": 0.25, "eval/accuracy_stderr": 0.013})
        for step in range(1, rewards + 1):
            metrics.write(step, {"reward/mean": step / 10, "accuracy/mean": 0.5})
    paths = {
        "logger": {"metrics_path": str(folder / "metrics.jsonl")},
        "ckpt": {"path": str(folder / "saved")},
    }
    return RunConfig(**paths)


def test_first_and_last_are_means_of_five_steps_at_most_and_never_of_the_same_ones(tmp_path):
    config = run_of(tmp_path, 12)
    found = results(config)
    assert found["averaged_steps"] == 5 and [round(mean, 9) for mean, _ in found["reward"]] == [
        0.3,
        1.0,
    ]
    assert found["steps"] == 12 and found["held_out"] == [(0.25, 0.013)] * 2
    (tmp_path / "one").mkdir()
    assert results(run_of(tmp_path / "one", 1))["reward"] == [(0.1, None)] * 2


def test_a_mean_score_that_is_no_accuracy_is_said_as_such(tmp_path):
    config = run_of(tmp_path, 0)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        metrics.write(1, {"reward/mean": 0.5, "accuracy/mean": 0.25, "score/mean": 0.5})
        scores = {"eval/score_mean": 0.448, "eval/score_mean_stderr": 0.034}
        metrics.write(1, {"eval/accuracy": 0.234, "eval/accuracy_stderr": 0.02, **scores})
    text = last_words(config, 0, 1.0)
    assert "held-out accuracy 0.234 +- 0.020 after step 1\n" in text
    assert "held-out mean score 0.448 +- 0.034 after step 1\n" in text
    assert "training mean score 0.500 in the first step" in text


def test_a_run_that_has_failed_says_from_where_it_goes_on_and_its_only_evaluation_once(tmp_path):
    config = run_of(tmp_path, 12)
    text = last_words(config, 1, 200.0)
    assert text.startswith("the run has failed: 12 steps, 3 min 20 s in this command\n")
    assert "\n  held-out accuracy 0.250 +- 0.013 after step 0\n" in text
    assert f"no checkpoint is in {tmp_path / 'saved'}: the run has to begin again" in text
    assert "final checkpoint" not in text and "evaluate" not in text
    (tmp_path / "saved/global_step4").mkdir(parents=True)
    (tmp_path / "saved/global_step4/controller.json").write_text("{}")
    saved = tmp_path / "saved/global_step4"
    words = (
        f"once the cause is mended, to go on from {saved}: the same command with --ckpt.load_enable"
    )
    assert f"  next:\n    {words}\n    openrlhf-ext report " in last_words(config, 137, 1.0)
    interrupted = last_words(config, 143, 1.0)
    assert (
        interrupted.startswith("the run was interrupted: ")
        and "--ckpt.load_enable" not in interrupted
    ), "said before"


def test_steps_without_a_gradient_are_counted_and_no_report_is_offered_before_the_first(tmp_path):
    config = run_of(tmp_path, 0)
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        for step, norm in enumerate((0.5, 0.0, 0.0), start=1):
            metrics.write(step, {"reward/mean": 0.1, "accuracy/mean": 0.0, "grad_norm": norm})
    assert "\n  no gradient       in 2 of 3 steps\n" in last_words(config, 0, 1.0)
    (tmp_path / "metrics.jsonl").unlink()
    text = last_words(config, 143, 1.0)
    assert text.startswith("the run was interrupted: 0 steps") and "next:" not in text
