"""What is counted of an evaluation, set by set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from openrlhf_ext.driver.description import held_out_samples
from openrlhf_ext.driver.evaluation import evaluation_metrics, set_metrics
from openrlhf_ext.driver.rollouts import Group, Prompt
from openrlhf_ext.reporting import is_documented
from openrlhf_ext.rollout.response import Response
from tests.driver.simulated import response
from tests.driver.test_loop import held_out


def groups(*scores: tuple[float, ...], source: str = "s") -> list[Group]:
    return [
        Group(Prompt(number, "p", "", source), [response("p", 0, 0, score) for score in own])
        for number, own in enumerate(scores)
    ]


def nothing_stated(responses: Sequence[Response]) -> list[str]:
    """Completions without an answer."""
    return [""] * len(responses)


def test_pass_at_k_is_the_unbiased_formula_and_right_is_told_from_wrong() -> None:
    sampled = groups((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 0.0))
    longer = replace(
        sampled[0].responses[0], actions=((2, 4),), logprobs_T=np.array([-2.0, -4.0], np.float32)
    )
    sampled[0].responses[0] = longer
    found = set_metrics(sampled, 1.0, nothing_stated)
    assert found["accuracy"] == found["pass@1"] == pytest.approx(3 / 8)
    assert found["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2) and found["pass@4"] == 1.0
    assert "pass@3" not in found and "maj@2" not in found, (
        "powers of two; nobody said what the answers are"
    )
    assert found["entropy_wrong"] == pytest.approx(0.75) and found[
        "entropy_right"
    ] == pytest.approx((3 + 0.75 * 2) / 3)
    assert found["length_right"] == found["length_wrong"] == 2
    assert not {"entropy_right", "entropy_wrong"} & set_metrics(sampled, 0.0, nothing_stated).keys()


def test_the_majority_goes_by_stated_answers() -> None:
    texts = [r"\boxed{7}", "#### 8", "<answer>8.</answer>", "none"]
    found = set_metrics(groups((1.0, 0.0, 0.0, 0.0)), 1.0, lambda responses: texts)
    assert found["maj@1"] == pytest.approx(1 / 4) and found["maj@4"] == 0.0, (
        "8 and 8. are one answer, twice"
    )
    # of six pairs: right with each 8 (ties, a half each), and with none
    assert found["maj@2"] == pytest.approx((0.5 + 0.5 + 1) / 6)
    assert "maj@1" not in set_metrics(
        groups((1.0, 0.0)), 1.0, lambda responses: ["nothing", "at all"]
    )


def test_shown_held_out_completions_are_the_same_ones_at_every_evaluation() -> None:
    sets = [held_out("aime24").options, held_out("math500").options]
    own = groups((1.0,) * 6, (0.0,) * 6, (0.0,))
    own[1].responses[0] = replace(own[1].responses[0], entropies_T=np.array([2, 3], np.float32))
    shown = held_out_samples(sets, [own, groups((0.5,))], 2)
    names = ["aime24 0"] * 4 + ["aime24 1"] * 4 + ["math500 0"]
    assert [sample["group"] for sample in shown] == names, "four of each of two prompts"
    assert shown[4]["entropies"] == [2, 3] and "entropies" not in shown[5]
    assert shown[5]["rollout_logprobs"] == [-0.5, -1.0] and "logprobs" not in shown[5]
    assert len(held_out_samples(sets, [own, groups((0.5,))], 0)) == 10, "all prompts"


def test_named_sets_have_metrics_of_their_own_and_a_mean() -> None:
    sets = [held_out("aime24", samples=2).options, held_out("math500", samples=1).options]
    found = evaluation_metrics(
        sets, [groups((1.0, 1.0), (0.0, 0.0)), groups((1.0,), (1.0,))], nothing_stated
    )
    assert found["eval/aime24/accuracy"] == 0.5 and found["eval/math500/accuracy"] == 1.0
    assert found["eval/accuracy"] == 0.75 and found["eval/samples"] == 6
    assert found["eval/accuracy_stderr"] == pytest.approx(0.5 / 2), (
        "that of the one with an error, over two sets"
    )
    assert (
        "eval/aime24/pass@2" in found
        and "eval/math500/pass@2" not in found
        and "eval/pass@2" not in found
    )
    assert all(map(is_documented, found))


def test_held_out_sources_are_told_apart_by_openrlhfs_names() -> None:
    sampled = [*groups((1.0, 0.0), (0.0, 0.0), source="aime"), *groups((1.0, 1.0), source="amc")]
    metrics = evaluation_metrics([held_out().options], [sampled], nothing_stated)
    named = {name: value for name, value in metrics.items() if name.startswith("eval_")}
    assert named == {
        "eval_aime_pass2": 0.5,
        "eval_aime_pass1": 0.25,
        "eval_amc_pass2": 1.0,
        "eval_amc_pass1": 1.0,
    }
    assert all(map(is_documented, metrics))


def test_accuracy_is_the_share_of_right_completions_and_not_the_mean_score() -> None:
    metrics = evaluation_metrics(
        [held_out().options], [groups((0.5, 1.0), (0.25, 0.75))], nothing_stated
    )
    assert (
        metrics["eval/accuracy"] == metrics["eval/pass@1"] == 0.25
        and metrics["eval/score_mean"] == 0.625
    )
    assert metrics["eval/accuracy_stderr"] == pytest.approx(0.25)
    assert metrics["eval/score_mean_stderr"] == pytest.approx(0.125) and all(
        map(is_documented, metrics)
    )


def test_held_out_accuracy_is_over_prompts() -> None:
    metrics = evaluation_metrics(
        [held_out().options], [groups((1.0, 0.0), (1.0, 1.0))], nothing_stated
    )
    assert metrics["eval/accuracy"] == 0.75 and metrics["eval/samples"] == 4
    assert (
        metrics["eval/accuracy_stderr"] == pytest.approx(0.25)
        and metrics["eval/response_length_mean"] == 2
    )
