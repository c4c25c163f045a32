"""Every method and option value agrees with the plain-loop reference: value, gradient and exposed
quantities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.helpers import check_against_reference, random_groups

PENALTIES = [
    None,
    {"kind": "none"},
    {"kind": "dapo", "l_max": 5, "l_cache": 3},
    {"kind": "dapo", "l_max": 4, "l_cache": 2, "factor": 0.5, "on": "correct"},
    {"kind": "tan_v1", "L1": 2, "L2": 5},
    {"kind": "tan_v1", "L1": 2, "L2": 4, "denominator": "L1", "on": "incorrect"},
    {"kind": "grop"},
    {"kind": "grop", "on": "correct"},
]
PARTITION = {
    "success_threshold": [0.5, 0.2],
    "degenerate": ["drop", "zero", "literal"],
    "degenerate_by": ["class", "reward"],
}
TRUNCATION = {"mask_truncated": [False, True]}
SEQUENCE = {
    "adv_eps": [1e-6, 1e-4],
    "ddof_seq": [1, 0],
    "normalize_std": [True, False],
    "baseline": ["seq", "token"],
}
PENALTY = {
    "length_penalty": PENALTIES,
    "grop_gamma1": [0.75, 0.6],
    "grop_medium_else": ["none", "incorrect"],
    "grop_hard_dapo": [None, {"l_max": 4, "l_cache": 2}],
    "stop_properly": [None, 0.5, -0.25],
}
CLIP = {"clip_low": [0.2, 0.1, None], "clip_high": [0.28, 0.05], "dual_clip": [None, 1.1, 3.0]}
KL = {"kl_coef": [0.0, 0.3]}
SCOPE = {"agg_scope": ["batch", "group"]}
AGG = {
    **SCOPE,
    "agg": ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
    "l_norm": [7.0, 3.5],
}
ENTROPY = {
    "base_reward": ["binary", "raw"],
    "entropy_eps": [1e-6, 1e-2],
    "eps_mode": ["shift", "denominator"],
    "entropy_clamp": [None, [0.1, 0.6]],
    "entropy_scope": ["group", "batch"],
    "normaliser": ["sum", "geomean"],
    "norm_scope": ["group", "batch"],
    "adv_pool": ["all", "own"],
    "adv_eps": [1e-6, 1e-4],
}
GROUP = {**PARTITION, **TRUNCATION, **SEQUENCE, **PENALTY}
COV = {**PARTITION, **SEQUENCE, **PENALTY, **SCOPE}
OPTIONS = {
    "grpo": {**GROUP, **CLIP, **KL, **AGG},
    "dapo": {**GROUP, **CLIP, **KL, **AGG},
    "cispo": {**GROUP, **KL, **AGG, "clip_low": [1.0, 0.2, None], "clip_high": [4.0, 0.1]},
    "gmpo": {**GROUP, "log_clip": [0.4, 0.1]},
    "sapo": {**GROUP, **KL, **AGG, "tau_pos": [1.0, 2.0], "tau_neg": [1.05, 3.0]},
    "gspo": {
        **GROUP,
        "clip_low": [3e-4, 0.2, None],
        "clip_high": [4e-4, 0.1],
        "dual_clip": [None, 1.1],
    },
    "gtpo_entropy": {
        **PARTITION,
        **TRUNCATION,
        **PENALTY,
        **ENTROPY,
        **CLIP,
        **KL,
        **SCOPE,
        "version": ["v6", "v1", "v1u", "v2"],
        "alpha": [0.1, 0.0, 0.5],
        "alpha1": [1.0, 0.9],
        "alpha2": [0.1, 0.2, 0.0],
        "kappa": [2.0, 4.0],
        "v2_positive": ["v1", "v1u"],
        "entropy_axis": ["column", "row", "matrix"],
        "inverse_floor": [0.0, 0.2],
        "ddof_tok": [0, 1],
        "sign_guard": [False, True],
    },
    "grpo_s": {
        **PARTITION,
        **TRUNCATION,
        **PENALTY,
        **ENTROPY,
        **CLIP,
        "version": ["v6", "v1", "v2"],
        "beta": [0.1, 0.4],
        "beta1": [1.0, 0.9],
        "beta2": [0.1, 0.0],
        "h_hat": ["arithmetic", "geometric"],
        "w_hat": ["arithmetic", "geometric"],
        "ddof_seq": [1, 0],
    },
    "gtpo_conflict": {
        **TRUNCATION,
        "preset": ["paper", "official"],
        "gamma": [0.1, 0.0, None],
        "entropy_threshold": [0.6931471805599453, 0.4, None],
        "h_ini": [None, 0.3, 0.9],
        "filter": ["all", "only_neg", "off"],
        "use_conflict": [True, False],
        "w_pos": [2.0, 1.5],
        "anchor": ["start", "first"],
        "overlap": ["or", "product", None],
        "zero_adv": ["literal", "skip"],
        "conflict_divisor": ["none", "max_run", None],
        "group_reduce": ["mean", "sum", None],
        "normalize_std": [True, False, None],
        "ddof_seq": [1, 0],
        "adv_eps": [1e-6, 1e-4],
        "sign_tol": [1e-8, 0.4],
        "clip_low": [None, 0.2],
        "clip_high": [0.2, 0.1],
    },
    "entropy_advantage": {
        **GROUP,
        **CLIP,
        **KL,
        **AGG,
        "ent_alpha": [0.4, 0.1, 3.0],
        "ent_kappa": [2.0, 1.5],
    },
    "high_entropy_tokens": {
        **GROUP,
        **CLIP,
        **KL,
        **SCOPE,
        "top_rho": [0.2, 0.5, 1.0, 0.33],
        "mask_denominator": ["selected", "all"],
    },
    "clip_cov": {
        **COV,
        "cov_ratio": [2e-4, 0.2],
        "cov_lb": [0.05, -5.0],
        "cov_ub": [5.0, 0.3],
        "clip_low": [1.0, 0.2, None],
        "clip_high": [1.0, 0.2],
        "dual_clip": [None, 1.1],
    },
    "kl_cov": {**COV, **KL, "cov_ratio": [2e-3, 0.3], "ppo_kl_coef": [1.0, 0.0, 0.4]},
    "on_policy_distillation": {**CLIP, **KL, **AGG, "most_gap": [10.0, 0.2]},
    "mixed_policy_dapo": {
        **GROUP,
        **CLIP,
        **KL,
        **AGG,
        "zero_batch": [False, True],
        "zero_weight": [1.0, 0.3],
    },
}
CORRECTIONS = [
    {"level": "token", "mode": "mask", "threshold": [0.8, 1.3]},
    {"level": "token", "mode": "clip", "threshold": [0.8, 1.2]},
    {"level": "seq", "mode": "mask", "threshold": [0.9, 1.1]},
    {"level": "token", "gating": "binary_kl", "threshold": 0.05},
    {"level": "seq", "gating": "tv", "threshold": [0.1]},
    {"level": "seq", "gating": "binary_kl", "threshold": 0.05},
    {"level": "token", "gating": "tv", "threshold": 0.1},
    {"level": "off"},
]


def legal(name: str, options: dict) -> dict:
    """Repair the few combinations that are configuration errors."""
    options = dict(options)
    if options.get("version") != "v2":
        options.pop("v2_positive", None)
    if options.get("eps_mode") == "denominator" and options.get("normaliser") == "geomean":
        # Needs entropies above zero.
        options["entropy_clamp"] = [0.1, 0.6]
    if options.get("eps_mode") == "denominator" and options.get("h_hat") == "geometric":
        options["entropy_clamp"] = [0.1, 0.6]
    return options


def base_options(name: str) -> dict:
    """First (default or required) value of the keys without a default."""
    required = {
        "gtpo_entropy": {"alpha1": 1.0, "alpha2": 0.1, "kappa": 2.0},
        "grpo_s": {"beta1": 1.0, "beta2": 0.1},
    }.get(name, {})
    if name == "clip_cov":
        required = {"cov_lb": 0.05}
    return dict(required)


def single_option_cases():
    for name, table in OPTIONS.items():
        yield name, {}
        for key, values in table.items():
            for value in values:
                extra = {"l_norm": 7.0} if value == "seq-mean-token-sum-norm" else {}
                if key == "v2_positive":
                    extra = {"version": "v2"}
                if key == "clip_low" and name == "gtpo_conflict":
                    extra = {"clip_high": 0.2}
                if key.startswith("grop_"):
                    extra = {"length_penalty": {"kind": "grop"}}
                yield name, {**extra, key: value}


CASES = list(single_option_cases())


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{o}" for n, o in CASES])
def test_every_option_value(name: str, options: dict) -> None:
    options = legal(name, {**base_options(name), **options})
    for seed in (1, 2):
        check_against_reference(name, options, random_groups(seed), shuffle=seed)


@st.composite
def option_sets(draw, name: str) -> dict:
    return legal(
        name, {key: draw(st.sampled_from(values)) for key, values in OPTIONS[name].items()}
    )


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_random_option_combinations(name: str, data: st.DataObject, seed: int) -> None:
    options = data.draw(option_sets(name))
    correction = data.draw(st.sampled_from([None, None, *CORRECTIONS]))
    check_against_reference(name, options, random_groups(seed), shuffle=seed, correction=correction)


@pytest.mark.parametrize("name", sorted(OPTIONS))
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_float32(name: str, data: st.DataObject, seed: int) -> None:
    options = data.draw(option_sets(name))
    check_against_reference(
        name, options, random_groups(seed), dtype=torch.float32, tolerance=1e-5, shuffle=seed
    )


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_every_correction(name: str, correction: dict) -> None:
    check_against_reference(
        name, base_options(name), random_groups(5), shuffle=3, correction=correction
    )


@pytest.mark.parametrize("name", ["grpo", "dapo", "gtpo_entropy", "gtpo_conflict"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_in_the_loss(name: str, estimator: str) -> None:
    product = {"kl": {"coef": 0.3, "estimator": estimator}}
    check_against_reference(
        name, base_options(name), random_groups(7), product=product, kl=(0.3, estimator)
    )


@pytest.mark.parametrize("name", ["gtpo_entropy", "gtpo_conflict", "grpo_s"])
@pytest.mark.parametrize("seed", range(3))
def test_larger_groups(name: str, seed: int) -> None:
    groups = random_groups(seed, groups=2, max_size=9, max_length=12, vocabulary=2)
    check_against_reference(name, base_options(name), groups, shuffle=seed)
