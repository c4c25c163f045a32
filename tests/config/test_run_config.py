from __future__ import annotations

import pytest

from openrlhf_ext.config import ConfigError
from openrlhf_ext.config.estimator import algorithm_options, initial_entropy_prompts
from openrlhf_ext.options.sections.algo import ESTIMATORS, SINGLE


def options_of(load, *words: str) -> dict:
    return algorithm_options(load(*words))[1]


NO_KL = ("--algo.kl.init_coef", "0")


@pytest.mark.parametrize(
    "name", sorted({*ESTIMATORS} - {"gtpo_entropy", "grpo_s", "on_policy_distillation"})
)
def test_unset_flags_leave_the_defaults_to_the_estimator(load, name):
    assert algorithm_options(load("--algo.advantage.estimator", name, *NO_KL)) == (name, {}, None)


def test_options_without_a_default_get_the_published_values(load):
    gtpo = ["--algo.advantage.estimator", "gtpo_entropy"]
    assert options_of(load, *gtpo) == {"alpha1": 1.0, "alpha2": 0.1}
    assert options_of(load, *gtpo, "--algo.gtpo_entropy.alpha2", "0.2") == {
        "alpha1": 1.0,
        "alpha2": 0.2,
    }
    assert options_of(load, *gtpo, "--algo.gtpo_entropy.version", "v1") == {"version": "v1"}
    assert options_of(load, "--algo.advantage.estimator", "grpo_s") == {"beta1": 1.0, "beta2": 0.1}
    papers = [
        *NO_KL,
        "--algo.advantage.estimator",
        "dr_grpo",
        "--algo.dr_grpo.agg",
        "seq-mean-token-sum-norm",
    ]
    assert options_of(load, *papers) == {"agg": "seq-mean-token-sum-norm", "l_norm": 64}
    assert options_of(load, *papers, "--algo.dr_grpo.l_norm", "8")["l_norm"] == 8
    by_agg = options_of(load, "--algo.grpo.agg", "seq-mean-token-sum-norm")
    assert by_agg == {"agg": "seq-mean-token-sum-norm", "l_norm": 64}


def test_flags_of_openrlhf_set_options_of_the_estimator(load):
    words = [
        "--actor.eps_clip_low_high",
        "0.2",
        "0.3",
        "--actor.dual_clip",
        "10",
        "--actor.loss_agg_mode",
        "seq-mean-token-mean",
        "--algo.advantage.no_std_norm",
        "--reward.overlong_buffer_len",
        "16",
        "--reward.overlong_penalty_factor",
        "0.5",
    ]
    assert options_of(load, *words) == {
        "clip_low": 0.2,
        "clip_high": 0.3,
        "dual_clip": 10,
        "agg": "seq-mean-token-mean",
        "normalize_std": False,
        "length_penalty": {"kind": "dapo", "l_max": 64, "l_cache": 16, "factor": 0.5},
    }


def test_a_flag_given_its_default_acts_and_an_absent_one_does_not(load):
    dapo = ["--algo.advantage.estimator", "dapo"]
    assert options_of(load, *dapo) == {}
    assert options_of(load, *dapo, "--actor.eps_clip", "0.2") == {"clip_low": 0.2, "clip_high": 0.2}
    assert options_of(load, *dapo, "--actor.loss_agg_mode", "token-mean") == {"agg": "token-mean"}
    assert options_of(load, *dapo, "--algo.advantage.no_std_norm", "false") == {}


def test_only_the_options_of_the_chosen_estimator_count(load):
    words = [
        "--algo.advantage.estimator",
        "dapo",
        "--algo.grpo.clip_low",
        "9",
        "--algo.dapo.clip_low",
        "0.1",
    ]
    assert options_of(load, *words) == {"clip_low": 0.1}


def test_importance_correction(load):
    prefix = "--algo.advantage.is_correction_"
    assert algorithm_options(load())[2] is None
    assert algorithm_options(load(f"{prefix}level", "token"))[2] == {
        "level": "token",
        "mode": "mask",
        "gating": "ratio",
        "threshold": [0.5, 5.0],
    }
    words = [f"{prefix}level", "seq", f"{prefix}gating", "binary_kl", f"{prefix}threshold", "0.01"]
    assert algorithm_options(load(*words))[2] == {
        "level": "seq",
        "mode": "mask",
        "gating": "binary_kl",
        "threshold": [0.0, 0.01],
    }


@pytest.mark.parametrize(("name", "ours"), [("gtpo", "gtpo_conflict"), ("ppo", "gae")])
def test_other_names_of_estimators_are_refused_with_ours(problems, name, ours):
    (message,) = problems("--algo.advantage.estimator", name)
    assert ours in message.split(f"got {name} ")[1]


def test_flags_of_openrlhf_reach_its_own_estimators(load):
    words = [
        "--actor.policy_loss_type",
        "gspo",
        "--reward.clip_range",
        "-1",
        "2",
        "--algo.advantage.gamma",
        "0.9",
        "--reward.stop_properly_penalty_coef",
        "0.5",
        "--algo.advantage.no_std_norm",
    ]
    flags = {"policy_loss_type": "gspo", "reward_clip": (-1, 2), "stop_properly": 0.5}
    whitened = flags | {"normalize_std": False}
    for name, wanted in (
        ("reinforce", whitened | {"gamma": 0.9}),
        ("reinforce_baseline", whitened),
        ("rloo", flags),
        ("group_norm", flags),
        ("dr_grpo", flags),
    ):
        assert options_of(load, "--algo.advantage.estimator", name, *words, *NO_KL) == wanted


@pytest.mark.parametrize(
    "name", ["reinforce", "flash_reinforce", "reinforce_baseline", "rloo", "group_norm"]
)
def test_one_response_per_prompt_is_enough_where_nothing_is_compared(problems, name):
    found = problems(
        "--algo.advantage.estimator",
        name,
        "--rollout.n_samples_per_prompt",
        "1",
        "--train.batch_size",
        "2",
    )
    compares = [message for message in found if "must be at least 2" in message]
    assert len(compares) == (name not in SINGLE), found


def test_options_can_be_given_by_programs(build):
    config = build(
        {"algo.advantage.estimator": "dapo", "algo.dapo": {"length_penalty": {"kind": "grop"}}}
    )
    assert algorithm_options(config)[1] == {"length_penalty": {"kind": "grop"}}
    with pytest.raises(
        ConfigError, match=r"unknown option train.sead \(code\); did you mean train.seed"
    ):
        build({"train.sead": 1})


@pytest.mark.parametrize(
    ("words", "prompts"),
    [
        ((), 100),
        (("initial_entropy_prompts", "12"), 12),
        (("initial_entropy_prompts", "0"), 0),
        (("h_ini", "0.5"), 0),
        (("h_ini", "null"), 0),
        (("filter", "off"), 0),
        (("filter", "only_neg"), 100),
        (("preset", "official"), 0),
        (("preset", "paper"), 100),
    ],
)
def test_the_initial_entropy_is_measured_where_the_filter_goes_by_it(load, words, prompts):
    flags = (f"--algo.gtpo_conflict.{words[0]}", words[1]) if words else ()
    config = load("--algo.advantage.estimator", "gtpo_conflict", *flags)
    assert initial_entropy_prompts(config) == prompts


def test_other_estimators_measure_no_initial_entropy(load):
    assert initial_entropy_prompts(load("--algo.advantage.estimator", "dapo")) == 0


GROP = ["--reward.length_penalty.kind", "grop", "--reward.length_penalty.grop_gamma1", "0.7"]


@pytest.mark.parametrize(
    "estimator", ["gtpo_entropy", "grpo_s", "dapo", "grpo", "high_entropy_tokens", "gae"]
)
def test_one_length_penalty_is_that_of_every_estimator(load, estimator):
    words = [*NO_KL, "--algo.advantage.estimator", estimator]
    by_section = options_of(load, *words, *GROP)
    assert (by_section["length_penalty"], by_section["grop_gamma1"]) == ({"kind": "grop"}, 0.7)
    own = [
        f"--algo.{estimator}.length_penalty",
        "{kind: grop}",
        f"--algo.{estimator}.grop_gamma1",
        "0.7",
    ]
    assert options_of(load, *words, *own) == by_section, "the estimator's own name goes on working"
    assert options_of(load, *words, *own, *GROP) == by_section
    assert "length_penalty" not in options_of(load, *words)


def test_two_length_penalties_are_refused(problems):
    words = ["--algo.advantage.estimator", "dapo", *GROP]
    (two,) = problems(*words, "--algo.dapo.length_penalty", "{kind: dapo, l_max: 8, l_cache: 2}")
    assert (
        "reward.length_penalty.kind and algo.dapo.length_penalty set the same thing to two values"
        in two
    )
    (two,) = problems(*words, "--reward.overlong_buffer_len", "16")
    assert "both set the penalty on long responses: got 16 and grop; keep one of them" in two


def test_a_length_penalty_that_lacks_lengths_or_does_not_read_them_says_so(load, problems):
    (missing,) = problems(
        "--reward.length_penalty.kind", "tan_v1", "--reward.length_penalty.L1", "4"
    )
    assert missing == "reward.length_penalty kind 'tan_v1' requires L2"
    warnings = load(*NO_KL, *GROP, "--reward.length_penalty.l_max", "9").warnings
    assert [w for w in warnings if "reward.length_penalty.l_max has no effect" in w]
    warnings = load(*NO_KL, "--reward.length_penalty.on", "correct").warnings
    assert [w for w in warnings if "reward.length_penalty.on has no effect" in w]
