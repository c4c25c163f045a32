"""Options of methods: published defaults, nulls, presets, and errors that name the option and the
remedy."""

from __future__ import annotations

import logging

import pytest

from openrlhf_ext.algorithms import algorithm_names, describe_options, get_algorithm
from tests.algorithms.reference import DEFAULTS, OFFICIAL

REQUIRED = {
    "gtpo_entropy": {"alpha1": 1.0, "alpha2": 0.1},
    "grpo_s": {"beta1": 1.0, "beta2": 0.1},
}


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_keys_and_defaults_are_those_of_the_reference(name: str) -> None:
    described = {info.name: info.default for info in describe_options(name)}
    described.pop("initial_entropy_prompts", None)  # read by the driver, which measures h_ini
    assert described == DEFAULTS[name]


def test_every_option_is_described() -> None:
    for name in algorithm_names():
        for info in describe_options(name):
            assert info.help
            assert not info.choices or info.default in info.choices


def test_recommended_values_are_described() -> None:
    recommended = {
        o.name: o.info.recommended for o in describe_options("gtpo_entropy") if o.info.recommended
    }
    assert recommended == {"alpha1": 1.0, "alpha2": 0.1}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grpo", {"clip_hgh": 0.3}, "unknown option 'clip_hgh'; did you mean 'clip_high'"),
        ("gtpo_entropy", {"entropy_axes": "row"}, "did you mean 'entropy_axis'"),
        (
            "grpo",
            {"agg": "token_mean"},
            "agg: expected one of .* got token_mean; did you mean token-mean",
        ),
        ("grpo", {"clip_low": "x"}, "clip_low: expected number >= 0 or null, got x"),
        ("grpo", {"clip_low": True}, "clip_low: expected number >= 0 or null, got true"),
        ("grpo", {"mask_truncated": "maybe"}, "mask_truncated: expected true or false, got maybe"),
        ("grpo", {"ddof_seq": 2}, "ddof_seq: expected one of 0, 1, got 2"),
        ("grpo", {"degenerate": None}, "degenerate: expected one of drop, zero, literal, got null"),
        ("grpo", {"clip_high": None}, "clip_low = 0.2 needs clip_high"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip: expected number > 1 or null, got 1"),
        ("grpo", {"adv_eps": -1}, "adv_eps: expected number >= 0, got -1"),
        (
            "grpo",
            {"agg": "seq-mean-token-sum-norm"},
            "l_norm is required with agg seq-mean-token-sum-norm",
        ),
        ("dr_grpo", {"agg": "seq-mean-token-sum-norm"}, "l_norm is required"),
        ("gtpo_entropy", {}, "alpha1 is required with version v6 .published for v6: 1.0"),
        (
            "gtpo_entropy",
            {"alpha1": 1.0},
            "alpha2 is required with version v6 .published for v6: 0.1",
        ),
        (
            "gtpo_entropy",
            {"version": "v1u", "alpha1": 0.9, "alpha2": 0.1},
            "kappa is required with version v1u",
        ),
        (
            "gtpo_entropy",
            {"version": "v1u", "alpha1": 0.5, "alpha2": 0.5, "kappa": 4.0},
            "clip interval .* is empty",
        ),
        (
            "gtpo_entropy",
            {"version": "v1u", "alpha1": 0.9, "alpha2": 0.1, "kappa": 1.0},
            "kappa: expected number > 1 or null, got 1",
        ),
        ("gtpo_entropy", {"version": "v3"}, "version: expected one of v1, v1u, v2, v6, got v3"),
        (
            "gtpo_entropy",
            {"version": "v1", "entropy_clamp": [0.3, 0.2]},
            "entropy_clamp: expected 2 numbers LOW HIGH with",
        ),
        ("grpo_s", {}, "beta1 is required with version v6 .published for v6: 1.0"),
        ("grpo_s", {"version": "v1u"}, "version: expected one of v1, v2, v6, got v1u"),
        ("gtpo_conflict", {"clip_low": 0.2}, "clip_low = 0.2 needs clip_high"),
        (
            "gtpo_conflict",
            {"preset": "papr"},
            "preset: expected one of paper, official, got papr; did you mean paper",
        ),
        ("clip_cov", {"mask_truncated": True}, "mask_truncated = true is not defined"),
        ("kl_cov", {"mask_truncated": True}, "mask_truncated = true is not defined"),
        ("clip_cov", {"kl_coef": 0.1}, "kl_coef = 0.1 is not defined for clip_cov"),
        ("grpo", {"length_penalty": {"kind": "dapo", "l_max": 5}}, "kind 'dapo' requires l_cache"),
        ("grpo", {"length_penalty": {"kind": "tan_v1", "L1": 5, "L2": 5}}, "requires L2 > L1"),
        ("grpo", {"length_penalty": {}}, "length_penalty.kind is required .formula of the penalty"),
        (
            "grpo",
            {"length_penalty": {"kind": "dapo", "lmax": 5}},
            "unknown option 'lmax'; did you mean 'l_max'",
        ),
        (
            "grpo",
            {"length_penalty": "dapo"},
            "length_penalty: expected map of kind, on, .* or null, got dapo",
        ),
        ("grpo", {"grop_hard_dapo": {"l_max": 5}}, "grop_hard_dapo.l_cache is required"),
        ("grpo", {"grop_gamma1": 1.0}, "grop_gamma1: expected number > 0 and < 1, got 1"),
        (
            "grpo",
            {"correction": {"level": "seq", "mode": "clip"}},
            "mode clip requires level token",
        ),
        ("grpo", {"correction": {"gating": "tv"}}, "upper bound only"),
        ("grpo", {"correction": {"levle": "seq"}}, "unknown option 'levle'; did you mean 'level'"),
        ("grpo", {"kl": {"coef": 0.1}, "kl_coef": 0.1}, "both set a penalty"),
        ("gspo", {"kl": {"coef": 0.1}}, "takes a KL penalty only in the reward"),
        (
            "grpo_s",
            {"beta1": 1, "beta2": 0.1, "kl": {"coef": 0.1}},
            "takes a KL penalty not at all",
        ),
        (
            "gtpo_conflict",
            {"kl": {"coef": 0.1, "place": "reward"}},
            "takes a KL penalty only in the loss",
        ),
        ("kl_cov", {"kl": {"estimator": "k3"}}, "kl: coef is required"),
        ("grpo", {"foo": 1}, r"unknown option 'foo'\. Options: adv_eps, agg, "),
        ("grpo", {"ddof_seq": True}, "ddof_seq: expected one of 0, 1, got true"),
        ("gtpo_conflict", {"gamma": -1}, "gamma: expected number >= 0, got -1"),
        ("gtpo_conflict", {"w_pos": -2}, "w_pos: expected number >= 0, got -2"),
        ("kl_cov", {"ppo_kl_coef": -1}, "ppo_kl_coef: expected number >= 0, got -1"),
        ("kl_cov", {"cov_ratio": 2}, "cov_ratio: expected number >= 0 and <= 1, got 2"),
        ("clip_cov", {"cov_ratio": 2}, "cov_ratio: expected number >= 0 and <= 1, got 2"),
        (
            "clip_cov",
            {"cov_lb": 5, "cov_ub": 1},
            "band of candidates is empty: cov_lb = 5.0 must be below cov_ub = 1",
        ),
        (
            "clip_cov",
            {"perm": [0, 0]},
            "perm: expected list of distinct integers >= 0 or null, got 0 0",
        ),
        ("mixed_policy_dapo", {"zero_weight": -1}, "zero_weight: expected number >= 0, got -1"),
        (
            "gtpo_entropy",
            {"alpha1": 0, "alpha2": 0},
            "alpha1 = alpha2 = 0 makes all shaped rewards 0",
        ),
        ("grpo_s", {"beta1": 0, "beta2": 0}, "beta1 = beta2 = 0 makes all shaped rewards 0"),
        (
            "gtpo_entropy",
            {**REQUIRED["gtpo_entropy"], "alpha1": -1},
            "alpha1: expected number >= 0 or null, got -1",
        ),
        ("gtpo_entropy", {"version": "v1", "alpha": -0.1}, "alpha: expected number >= 0, got -0.1"),
        ("grpo_s", {"beta1": 1, "beta2": -1}, "beta2: expected number >= 0 or null, got -1"),
        ("grpo_s", {"version": "v1", "beta": -1}, "beta: expected number >= 0, got -1"),
        ("entropy_advantage", {"ent_alpha": -1}, "ent_alpha: expected number >= 0, got -1"),
        ("entropy_advantage", {"ent_kappa": 0.5}, "ent_kappa: expected number >= 1, got 0.5"),
        (
            "gtpo_conflict",
            {"entropy_threshold": -1},
            "entropy_threshold: expected number >= 0, got -1",
        ),
        ("gtpo_conflict", {"h_ini": -1}, "h_ini: expected number >= 0 or null, got -1"),
        (
            "gtpo_conflict",
            {"initial_entropy_prompts": 1.5},
            "initial_entropy_prompts: expected integer >= 0, got 1.5",
        ),
        ("kl_cov", {"clip_low": -1}, "clip_low: expected number >= 0 or null, got -1"),
        ("gae", {"lambd": 1.1}, "lambd: expected number >= 0 and <= 1, got 1.1"),
        (
            "grpo",
            {"length_penalty": {"kind": "dapo", "l_max": 4, "l_cache": 2, "factor": -1}},
            "factor: expected number",
        ),
        (
            "grpo",
            {"length_penalty": {"kind": "dapo", "l_max": 4, "l_cache": -2}},
            "l_cache: expected integer > 0",
        ),
        ("grpo", {"kl": {"coef": -1}}, "kl: coef: expected number >= 0, got -1"),
        (
            "grpo",
            {"kl": {"coef": 1, "place": "reward", "unbiased_gradient": True}},
            "needs place loss",
        ),
        (
            "grpo",
            {"correction": {"threshold": [3, 2]}},
            "correction: threshold: expected 2 numbers LOW HIGH",
        ),
    ],
)
def test_errors_name_the_option_and_the_rule(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_algorithm(name, **options)


def test_all_violations_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as error:
        get_algorithm("grpo", agg="x", clip_low=-1.0, nonsense=3)
    for text in ("agg: expected", "clip_low: expected", "unknown option 'nonsense'"):
        assert text in str(error.value)


def test_a_key_of_another_algorithm_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        algorithm = get_algorithm("grpo", alpha1=1.0)
    assert "grpo does not read the option 'alpha1'" in caplog.text
    assert not hasattr(algorithm.options, "alpha1")


def test_null_takes_the_default_but_for_three_keys() -> None:
    options = get_algorithm("dapo", adv_eps=None, clip_low=None, dual_clip=None).options
    assert options.adv_eps == 1e-6
    assert options.clip_low is None
    assert get_algorithm("gtpo_conflict", h_ini=None).options.h_ini is None


def test_clip_high_may_be_null_without_clipping() -> None:
    assert get_algorithm("dapo", clip_low=None, clip_high=None).options.clip_high is None


def test_presets_replace_defaults_and_explicit_keys_win() -> None:
    official = get_algorithm("gtpo_conflict", preset="official").options
    assert {key: getattr(official, key) for key in OFFICIAL} == OFFICIAL
    assert get_algorithm("gtpo_conflict", preset="official", overlap="or").options.overlap == "or"
    assert get_algorithm("gtpo_conflict", preset="official", gamma=None).options.gamma == 0.1


def test_values_may_come_as_text_from_a_command_line() -> None:
    options = get_algorithm(
        "gtpo_entropy", alpha1="1", alpha2="1e-1", sign_guard="true", ddof_tok="1"
    ).options
    assert (options.alpha1, options.alpha2, options.sign_guard, options.ddof_tok) == (
        1.0,
        0.1,
        True,
        1,
    )


@pytest.mark.parametrize(
    ("name", "options", "warning"),
    [
        (
            "gtpo_conflict",
            {"clip_high": 0.2},
            "clip_high has no effect: got 0.2, and without clip_low",
        ),
        ("kl_cov", {"dual_clip": 3}, "dual_clip has no effect: got 3, and kl_cov clips nothing"),
        (
            "gtpo_entropy",
            {**REQUIRED["gtpo_entropy"], "v2_positive": "v1u"},
            "v2_positive has no effect: got v1u",
        ),
        (
            "gtpo_entropy",
            {**REQUIRED["gtpo_entropy"], "alpha": 0.3},
            "alpha has no effect: got 0.3, and version v6",
        ),
        (
            "grpo_s",
            {**REQUIRED["grpo_s"], "beta": 0.3},
            "beta has no effect: got 0.3, and version v6",
        ),
        (
            "grpo",
            {"length_penalty": {"kind": "grop", "l_max": 5}},
            "length_penalty.l_max has no effect: got 5",
        ),
        (
            "grpo",
            {"length_penalty": {"kind": "dapo", "l_max": 5, "l_cache": 2, "L1": 3}},
            "kind dapo does not read it",
        ),
        (
            "grpo",
            {"grop_gamma1": 0.5},
            "grop_gamma1 has no effect: got 0.5, and length_penalty.kind is not grop",
        ),
        ("grpo", {"l_norm": 5}, "l_norm has no effect: got 5, and agg is seq-mean-token-mean"),
    ],
)
def test_what_nothing_reads_is_warned_of(
    caplog: pytest.LogCaptureFixture, name: str, options: dict, warning: str
) -> None:
    with caplog.at_level(logging.WARNING):
        get_algorithm(name, **options)
    assert f"{name}: {warning}" in caplog.text or warning in caplog.text


def test_the_bare_name_gtpo_is_refused_with_both_methods_named() -> None:
    with pytest.raises(ValueError, match="gtpo_entropy and gtpo_conflict"):
        get_algorithm("gtpo")


def test_unknown_algorithms_get_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'dappo'; did you mean 'dapo'"):
        get_algorithm("dappo")


def test_v2_warns_of_positive_advantages_of_failures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        get_algorithm("gtpo_entropy", version="v2")
    assert "tokens of wrong completions a positive advantage" in caplog.text


def test_mixed_policy_says_that_it_is_a_reconstruction(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        algorithm = get_algorithm("mixed_policy_dapo")
    assert "experimental reconstruction" in caplog.text
    assert "RECONSTRUCTION" in type(algorithm).__doc__


@pytest.mark.parametrize(
    ("name", "options", "silent"),
    [
        ("gtpo_entropy", {"version": "v1", "alpha1": 1.0, "alpha2": 0.1}, ["alpha1", "alpha2"]),
        ("gtpo_entropy", {"version": "v2", "kappa": 2.0}, ["kappa"]),
        ("gtpo_entropy", {"version": "v6", "alpha1": 1.0, "alpha2": 0.1, "kappa": 2.0}, ["kappa"]),
        ("gtpo_entropy", {"version": "v1u", "alpha1": 0.9, "alpha2": 0.1, "kappa": 2.0}, []),
        ("grpo_s", {"version": "v2", "beta1": 1.0, "beta2": 0.1}, ["beta1", "beta2"]),
        ("grpo_s", {"version": "v6", "beta1": 1.0, "beta2": 0.1}, []),
        ("gtpo_conflict", {"filter": "only_neg", "h_ini": 0.8}, ["filter"]),
        ("gtpo_conflict", {"filter": "only_neg", "h_ini": 0.6}, []),
        ("gtpo_conflict", {"filter": "off", "h_ini": 0.8}, []),
    ],
)
def test_options_that_a_version_does_not_read_are_said(
    name: str, options: dict, silent: list[str]
) -> None:
    said = [
        caution
        for caution in get_algorithm(name, **options).options.cautions()
        if "has no effect" in caution
    ]
    assert [caution.split()[0] for caution in said] == silent
