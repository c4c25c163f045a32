"""Slow reference implementations: plain Python loops over lists of floats, written from the
specification.

Nothing here imports the product. A batch is a list of groups, a group a list of completions, a
completion a dict with `tokens`, `reward`, `H`, `old`, `new` and optionally `ref`, `guide`,
`rollout`, `truncated`, `behavior`. Gradients are the analytic ones with respect to `new`.
"""

from __future__ import annotations

import math

LN2 = math.log(2.0)

_A = {"success_threshold": 0.5, "mask_truncated": False, "degenerate_by": "class"}
_B = {"adv_eps": 1e-6, "ddof_seq": 1, "normalize_std": True, "baseline": "seq"}
_C = {
    "length_penalty": None,
    "grop_gamma1": 0.75,
    "grop_medium_else": "none",
    "grop_hard_dapo": None,
}
_C["stop_properly"] = None
_E = {
    "base_reward": "binary",
    "entropy_scope": "group",
    "normaliser": "sum",
    "entropy_eps": 1e-6,
    "eps_mode": "shift",
    "entropy_clamp": None,
    "norm_scope": "group",
    "adv_pool": "all",
    "adv_eps": 1e-6,
}
_CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
_TOKEN_MEAN = {"agg": "token-mean", "agg_scope": "batch", "l_norm": None}

DEFAULTS = {
    "grpo": {
        **_A,
        **_B,
        **_C,
        **_CLIP,
        **_TOKEN_MEAN,
        "clip_high": 0.2,
        "degenerate": "literal",
        "kl_coef": 0.0,
        "agg": "seq-mean-token-mean",
    },
    "dapo": {**_A, **_B, **_C, **_CLIP, **_TOKEN_MEAN, "degenerate": "drop", "kl_coef": 0.0},
    "gspo": {
        **_A,
        **_B,
        **_C,
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "degenerate": "literal",
    },
    "gtpo_entropy": {
        **_A,
        **_C,
        **_E,
        **_CLIP,
        "version": "v6",
        "alpha": 0.1,
        "alpha1": None,
        "alpha2": None,
        "kappa": None,
        "v2_positive": "v1",
        "entropy_axis": "column",
        "inverse_floor": 0.0,
        "ddof_tok": 0,
        "sign_guard": False,
        "degenerate": "drop",
        "kl_coef": 0.0,
        "agg_scope": "batch",
    },
    "grpo_s": {
        **_A,
        **_C,
        **_E,
        **_CLIP,
        "version": "v6",
        "beta": 0.1,
        "beta1": None,
        "beta2": None,
        "h_hat": "arithmetic",
        "w_hat": "arithmetic",
        "ddof_seq": 1,
        "degenerate": "drop",
    },
    "gtpo_conflict": {
        "preset": "paper",
        "gamma": 0.1,
        "entropy_threshold": LN2,
        "h_ini": None,
        "filter": "all",
        "use_conflict": True,
        "w_pos": 2.0,
        "anchor": "start",
        "overlap": "or",
        "zero_adv": "literal",
        "conflict_divisor": "none",
        "group_reduce": "mean",
        "normalize_std": True,
        "ddof_seq": 1,
        "adv_eps": 1e-6,
        "sign_tol": 1e-8,
        "clip_low": None,
        "clip_high": None,
        "mask_truncated": False,
    },
    "entropy_advantage": {
        **_A,
        **_B,
        **_C,
        **_CLIP,
        **_TOKEN_MEAN,
        "ent_alpha": 0.4,
        "ent_kappa": 2.0,
        "degenerate": "zero",
        "kl_coef": 0.0,
    },
    "high_entropy_tokens": {
        **_A,
        **_B,
        **_C,
        **_CLIP,
        "top_rho": 0.2,
        "mask_denominator": "selected",
        "degenerate": "drop",
        "kl_coef": 0.0,
        "agg_scope": "batch",
    },
    "clip_cov": {
        **_A,
        **_B,
        **_C,
        "cov_ratio": 2e-4,
        "cov_lb": 1.0,
        "cov_ub": 5.0,
        "perm": None,
        "degenerate": "drop",
        "clip_low": 1.0,
        "clip_high": 1.0,
        "dual_clip": None,
        "agg_scope": "batch",
        "kl_coef": 0.0,
    },
    "kl_cov": {
        **_A,
        **_B,
        **_C,
        "cov_ratio": 2e-3,
        "ppo_kl_coef": 1.0,
        "degenerate": "drop",
        "kl_coef": 0.0,
        "agg_scope": "batch",
        "clip_low": None,
        "clip_high": None,
        "dual_clip": None,
    },
}
_RETURNS = {
    **_C,
    **_CLIP,
    **_TOKEN_MEAN,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "policy_loss_type": "ppo",
    "reward_clip": (-10, 10),
}
_WHITEN = {"whiten": True, "normalize_std": True, "adv_eps": 1e-8}
DEFAULTS |= {
    "reinforce": {**_RETURNS, **_WHITEN, "gamma": 1.0},
    "reinforce_baseline": {**_RETURNS, **_WHITEN},
    "rloo": _RETURNS,
    "group_norm": {**_RETURNS, "adv_eps": 1e-9},
    "flash_reinforce": _RETURNS,
    "dr_grpo": _RETURNS,
    "cispo": {
        **{
            key: value
            for key, value in {**_A, **_B, **_C, **_CLIP, **_TOKEN_MEAN}.items()
            if key != "dual_clip"
        },
        "degenerate": "literal",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "kl_coef": 0.0,
    },
    "gmpo": {**_A, **_B, **_C, "degenerate": "literal", "log_clip": 0.4},
    "sapo": {
        **_A,
        **_B,
        **_C,
        **_TOKEN_MEAN,
        "degenerate": "literal",
        "agg": "seq-mean-token-mean",
        "kl_coef": 0.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
    },
}
DEFAULTS["on_policy_distillation"] = {
    **_CLIP,
    **_TOKEN_MEAN,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "most_gap": 10.0,
}
DEFAULTS["mixed_policy_dapo"] = {**DEFAULTS["dapo"], "zero_batch": False, "zero_weight": 1.0}
OFFICIAL = {
    "normalize_std": False,
    "entropy_threshold": 0.7,
    "h_ini": None,
    "overlap": "product",
    "conflict_divisor": "max_run",
    "group_reduce": "sum",
    "gamma": 0.1,
    "w_pos": 2.0,
}


def options_of(name: str, given: dict) -> dict:
    base = dict(DEFAULTS[name])
    if given.get("preset") == "official":
        base.update(OFFICIAL)
    nullable = ("clip_low", "dual_clip", "h_ini")
    return {
        **base,
        **{key: value for key, value in given.items() if value is not None or key in nullable},
    }


# --- shared pieces
# --------------------------------------------------------------------------------------------------


def length(completion):
    return len(completion["tokens"])


def masked(completion, o):
    return bool(o.get("mask_truncated")) and bool(completion.get("truncated"))


def mean(values):
    return sum(values) / len(values)


def std(values, ddof):
    if len(values) - ddof <= 0:
        return 0.0
    center = mean(values)
    return math.sqrt(sum((v - center) ** 2 for v in values) / (len(values) - ddof))


def partition(group, o):
    threshold = o.get("success_threshold", 0.5)
    p = [i for i, c in enumerate(group) if c["reward"] > threshold and not masked(c, o)]
    n = [i for i, c in enumerate(group) if c["reward"] <= threshold and not masked(c, o)]
    return p, n


def is_degenerate(group, o):
    rewards = [c["reward"] for c in group]
    if o["degenerate_by"] == "reward":
        return max(rewards) == min(rewards)
    correct = sum(1 for r in rewards if r > o["success_threshold"])
    return correct == 0 or correct == len(group)


def dapo_penalty(t, l_max, l_cache, factor):
    if t <= l_max - l_cache:
        return 0.0
    if t <= l_max:
        return factor * ((l_max - l_cache) - t) / l_cache
    return -factor


def ramp(t, knee):
    if t < knee:
        return 0.0
    return -(t - knee) / (2 * knee) if t < 2 * knee else -0.5


def knee(lengths):
    return max((min(lengths) + max(lengths)) / 2, mean(lengths))


def grop_penalties(group, o):
    p, n = partition(group, o)
    lengths = [length(c) for c in group]
    out = [0.0] * len(group)
    fraction, g2 = len(p) / len(group), 1 - o["grop_gamma1"]
    if len(p) > 0 and fraction >= o["grop_gamma1"] - 1e-12:
        for i in p:
            out[i] = ramp(lengths[i], knee([lengths[k] for k in p]))
    elif fraction <= g2 + 1e-12:
        hard = o["grop_hard_dapo"]
        if hard:
            out = [dapo_penalty(t, hard["l_max"], hard["l_cache"], 1.0) for t in lengths]
    else:
        if len(p) > len(n):
            hit = p
        else:
            hit = n if o["grop_medium_else"] == "incorrect" else []
        for i in hit:
            out[i] = ramp(lengths[i], knee(lengths))
    return out


def penalties(group, o):
    out = length_penalties(group, o)
    coef = o["stop_properly"]
    for i, c in enumerate(group):
        if coef is not None and c["truncated"]:
            reward = c["reward"] + out[i]
            out[i] = (coef if coef < 0 else coef * reward) - c["reward"]
    return out


def length_penalties(group, o):
    spec = o["length_penalty"]
    if not spec or spec["kind"] == "none":
        return [0.0] * len(group)
    if spec["kind"] == "dapo":
        out = [
            dapo_penalty(length(c), spec["l_max"], spec["l_cache"], spec.get("factor", 1.0))
            for c in group
        ]
    elif spec["kind"] == "tan_v1":
        out = []
        short = spec["L2"] - spec["L1"]
        for c in group:
            t = length(c)
            if t <= short:
                out.append(0.0)
            elif t <= spec["L2"]:
                out.append((short - t) / spec[spec.get("denominator", "L2")])
            else:
                out.append(-1.0)
    else:
        out = grop_penalties(group, o)
    p, n = partition(group, o)
    allowed = {"all": range(len(group)), "correct": p, "incorrect": n}[spec.get("on", "all")]
    return [value if i in allowed else 0.0 for i, value in enumerate(out)]


def group_advantages(group, o):
    """Penalized rewards and A_i of 2.5, without the treatment of degenerate groups."""
    rewards = [c["reward"] + r for c, r in zip(group, penalties(group, o), strict=True)]
    if o["baseline"] == "token":
        mu = sum(length(c) * r for c, r in zip(group, rewards, strict=True)) / sum(
            length(c) for c in group
        )
    else:
        mu = mean(rewards)
    if not o["normalize_std"]:
        return rewards, [r - mu for r in rewards]
    sd = std(rewards, o["ddof_seq"])
    return rewards, [(r - mu) / (sd + o["adv_eps"]) for r in rewards]


def surrogate(w, a, o, dual=True):
    """Value, df/dw and whether the token counts as clipped."""
    low, high = o["clip_low"], o["clip_high"]
    if low is None:
        return w * a, a, False
    unclipped, cut = w * a, min(max(w, 1 - low), 1 + high) * a
    value, slope = (unclipped, a) if unclipped <= cut else (cut, 0.0)
    k = o.get("dual_clip")
    if dual and k is not None and a < 0 and value < k * a:
        value, slope = k * a, 0.0
    return value, slope, slope == 0.0 and a != 0.0


def kept_flags(groups, o):
    mode = o.get("degenerate", "literal")
    return [not (mode == "drop" and is_degenerate(g, o)) for g in groups]


def zeroed(group, o):
    return o.get("degenerate") == "zero" and is_degenerate(group, o)


def zeros(groups):
    return [[[0.0] * length(c) for c in g] for g in groups]


def token_omegas(groups, kept, counted, o):
    """omega per completion of 2.9."""
    agg, q = o.get("agg", "token-mean"), sum(kept)
    total = sum(counted[g][i] for g in range(len(groups)) if kept[g] for i in range(len(groups[g])))
    n_seq = sum(len(groups[g]) for g in range(len(groups)) if kept[g])
    out = []
    for g, group in enumerate(groups):
        row = []
        for i in range(len(group)):
            c = counted[g][i]
            if agg == "seq-mean-token-sum-norm":
                denominator = n_seq * o["l_norm"]
            elif agg == "seq-mean-token-mean":
                denominator = q * len(group) * c
            elif o.get("agg_scope", "batch") == "group":
                denominator = q * sum(counted[g])
            else:
                denominator = total
            row.append(1.0 / denominator if kept[g] and c > 0 and denominator > 0 else 0.0)
        out.append(row)
    return out


# --- importance correction (OpenRLHF's PolicyLoss)
# ------------------------------------------------------------------


def correction_factors(completion, correction):
    if not correction or correction.get("level", "token") == "off":
        return [1.0] * length(completion)
    level, mode = correction.get("level", "token"), correction.get("mode", "mask")
    gating, threshold = correction.get("gating", "ratio"), correction.get("threshold", (0.5, 5.0))
    threshold = threshold if isinstance(threshold, (list, tuple)) else [threshold]
    low, high = threshold if len(threshold) == 2 else (0.0, threshold[0])
    logs = [o - r for o, r in zip(completion["old"], completion["rollout"], strict=True)]
    if gating == "ratio":
        stats = [math.exp(x) for x in logs]
        if level == "seq":
            stats = [math.exp(mean(logs))] * len(logs)
    else:
        stats = []
        for old, rollout in zip(completion["old"], completion["rollout"], strict=True):
            p = min(max(math.exp(rollout), 1e-6), 1 - 1e-6)
            q = min(max(math.exp(old), 1e-6), 1 - 1e-6)
            if gating == "tv":
                stats.append(abs(p - q))
            else:
                stats.append(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
        if level == "seq":
            stats = [mean(stats)] * len(logs)
    if mode == "clip":
        return [min(max(s, low), high) for s in stats]
    return [math.exp(x) if low <= s <= high else 0.0 for x, s in zip(logs, stats, strict=True)]


# --- objectives
# --------------------------------------------------------------------------------------------------


def kl_term(estimator, ref, new):
    """Value and derivative with respect to new."""
    if estimator == "k1":
        return new - ref, 1.0
    if estimator == "k2":
        return 0.5 * (new - ref) ** 2, new - ref
    x = ref - new
    return math.exp(x) - x - 1, -(math.exp(x) - 1)


def token_loss(
    groups,
    advantages,
    omegas,
    o,
    *,
    token_mask=None,
    factors=None,
    correction=None,
    removed=(),
    penalized=(),
    kl=None,
    ratio_base=None,
):
    """Loss, gradient and clipped flags of a token-level objective."""
    loss, grad, clipped = 0.0, zeros(groups), zeros(groups)
    kl_coef, estimator = (o.get("kl_coef", 0.0), "k3") if kl is None else kl
    for g, group in enumerate(groups):
        for i, c in enumerate(group):
            omega = omegas[g][i]
            if omega == 0.0:
                continue
            importance = correction_factors(c, correction)
            if ratio_base is not None and c.get("behavior") == "guide":
                importance = [1.0] * length(c)
            base = c["old"] if ratio_base is None else ratio_base(c)
            for t in range(length(c)):
                if token_mask is not None and not token_mask[g][i][t]:
                    continue
                log_ratio, most = c["new"][t] - base[t], o.get("most_log_ratio", math.inf)
                w = math.exp(min(max(log_ratio, -most), most))
                value, slope, cut = surrogate(w, advantages[g][i][t], o)
                slope *= w if abs(log_ratio) <= most else 0.0
                clipped[g][i][t] = cut
                if (g, i, t) in removed:
                    value, slope = 0.0, 0.0
                factor = importance[t] * (1.0 if factors is None else factors[g][i][t])
                value, slope = value * factor, slope * factor
                if kl_coef:
                    k, dk = kl_term(estimator, c["ref"][t], c["new"][t])
                    value, slope = value - kl_coef * k, slope - kl_coef * dk
                if (g, i, t) in penalized:
                    difference = c["new"][t] - c["old"][t]
                    value -= o["ppo_kl_coef"] * abs(difference)
                    slope -= o["ppo_kl_coef"] * ((difference > 0) - (difference < 0))
                loss -= omega * value
                grad[g][i][t] -= omega * slope
    return loss, grad, clipped


def sequence_loss(groups, advantages, kept, o, kind, correction=None):
    loss, grad, ratios = 0.0, zeros(groups), []
    q = sum(kept)
    for g, group in enumerate(groups):
        ratios.append([])
        for i, c in enumerate(group):
            if not kept[g]:
                ratios[g].append(1.0)
                continue
            t_i = length(c)
            if kind == "geometric":
                s = math.exp(sum(n - b for n, b in zip(c["new"], c["old"], strict=True)) / t_i)
                slopes = [s / t_i] * t_i
            else:
                ws = [math.exp(n - b) for n, b in zip(c["new"], c["old"], strict=True)]
                s = sum(ws) / t_i
                slopes = [w / t_i for w in ws]
            ratios[g].append(s)
            if masked(c, o):
                continue
            value, slope, _ = surrogate(s, advantages[g][i], o)
            factor = mean(correction_factors(c, correction)) / (q * len(group))
            loss -= factor * value
            for t in range(t_i):
                grad[g][i][t] -= factor * slope * slopes[t]
    return loss, grad, ratios


# --- algorithms
# --------------------------------------------------------------------------------------------------


def group_relative(groups, o):
    kept = kept_flags(groups, o)
    rewards, seq = [], []
    for g, group in enumerate(groups):
        r, a = group_advantages(group, o)
        rewards.append(r)
        seq.append([0.0] * len(group) if not kept[g] or zeroed(group, o) else a)
    counted = [
        [0 if masked(c, o) or not kept[g] else length(c) for c in group]
        for g, group in enumerate(groups)
    ]
    tokens = [
        [[seq[g][i]] * length(c) for i, c in enumerate(group)] for g, group in enumerate(groups)
    ]
    return kept, rewards, seq, counted, tokens


def run_group_relative(groups, o, correction=None, kl=None):
    kept, rewards, seq, counted, tokens = group_relative(groups, o)
    omegas = token_omegas(groups, kept, counted, o)
    loss, grad, clipped = token_loss(groups, tokens, omegas, o, correction=correction, kl=kl)
    return {
        "loss": loss,
        "grad": grad,
        "advantages": tokens,
        "seq_advantages": seq,
        "rewards": rewards,
        "clipped": clipped,
    }


def returns_of(groups, o, baselined):
    """Rewards, and advantages of every token: discounted sums, whitened where the method does."""
    rewards = [
        [c["reward"] + r for c, r in zip(group, penalties(group, o), strict=True)]
        for group in groups
    ]
    everyone = [r for row in rewards for r in row]
    tokens = []
    for group, row in zip(groups, rewards, strict=True):
        scores = [baselined(i, row, everyone, o) for i in range(len(row))]
        if o["reward_clip"]:
            scores = [min(max(s, o["reward_clip"][0]), o["reward_clip"][1]) for s in scores]
        gamma = o.get("gamma", 1.0)
        pairs = zip(scores, group, strict=True)
        tokens.append(
            [[s * gamma ** (length(c) - 1 - t) for t in range(length(c))] for s, c in pairs]
        )
    if o.get("whiten"):
        flat = [a for group in tokens for row in group for a in row]
        center, variance = mean(flat), std(flat, 0) ** 2
        scale = 1 / math.sqrt(max(variance, o["adv_eps"])) if o["normalize_std"] else 1.0
        tokens = [[[(a - center) * scale for a in row] for row in group] for group in tokens]
    return rewards, tokens


def kl_token_mean(groups, coef, grad):
    """The k3 penalty, within 10, averaged over all tokens; its gradient is added."""
    total, loss = sum(length(c) for group in groups for c in group), 0.0
    for g, group in enumerate(groups):
        for i, c in enumerate(group):
            for t in range(length(c)):
                k, dk = kl_term("k3", c["ref"][t], c["new"][t])
                loss += coef * min(k, 10.0) / total
                grad[g][i][t] += coef * (dk if k < 10 else 0.0) / total
    return loss


def gspo_of_tokens(groups, tokens, o, correction):
    """One ratio per completion, an advantage per token; a corrected ratio is new / rollout."""
    loss, grad, base = 0.0, zeros(groups), "rollout" if correction else "old"
    for g, group in enumerate(groups):
        for i, c in enumerate(group):
            s = math.exp(mean([n - b for n, b in zip(c["new"], c[base], strict=True)]))
            weight = 1 / (len(groups) * len(group) * length(c))
            for a in tokens[g][i]:
                value, slope, _ = surrogate(s, a, o)
                loss -= weight * value
                for t in range(length(c)):
                    grad[g][i][t] -= weight * slope * s / length(c)
    return loss, grad


def run_returns(baselined):
    def run_method(groups, o, correction=None):
        rewards, tokens = returns_of(groups, o, baselined)
        if o["policy_loss_type"] == "gspo":
            loss, grad = gspo_of_tokens(groups, tokens, o, correction)
        else:
            counted = [[length(c) for c in group] for group in groups]
            omegas = token_omegas(groups, [True] * len(groups), counted, o)
            bare = {**o, "kl_coef": 0.0, "most_log_ratio": 20.0}
            loss, grad, _ = token_loss(groups, tokens, omegas, bare, correction=correction)
        if o["kl_coef"]:
            loss += kl_token_mean(groups, o["kl_coef"], grad)
        return {"loss": loss, "grad": grad, "advantages": tokens, "rewards": rewards}

    return run_method


def run_distillation(groups, o, correction=None):
    def gap(c):
        pairs = zip(c["guide"], c["old"], strict=True)
        return [min(max(guide - old, -o["most_gap"]), o["most_gap"]) for guide, old in pairs]

    tokens = [[gap(c) for c in group] for group in groups]
    counted = [[length(c) for c in group] for group in groups]
    omegas = token_omegas(groups, [True] * len(groups), counted, o)
    loss, grad, clipped = token_loss(groups, tokens, omegas, o, correction=correction)
    rewards = [[c["reward"] for c in group] for group in groups]
    return {
        "loss": loss,
        "grad": grad,
        "advantages": tokens,
        "rewards": rewards,
        "clipped": clipped,
    }


def run_gated(gate):
    """A function of the ratio in place of the clipped surrogate: value and slope in log w of a
    token."""

    def run_method(groups, o, correction=None):
        kept, rewards, seq, counted, tokens = group_relative(groups, o)
        omegas, loss, grad = token_omegas(groups, kept, counted, o), 0.0, zeros(groups)
        for g, group in enumerate(groups):
            for i, c in enumerate(group):
                factors = correction_factors(c, correction)
                for t in range(length(c)):
                    value, slope = gate(
                        math.exp(c["new"][t] - c["old"][t]), seq[g][i], c["new"][t], o
                    )
                    k, dk = kl_term("k3", c["ref"][t], c["new"][t])
                    loss -= omegas[g][i] * (factors[t] * value - o["kl_coef"] * k)
                    grad[g][i][t] -= omegas[g][i] * (factors[t] * slope - o["kl_coef"] * dk)
        return {
            "loss": loss,
            "grad": grad,
            "advantages": tokens,
            "seq_advantages": seq,
            "rewards": rewards,
        }

    return run_method


def cispo_gate(w, a, new, o):
    v = w if o["clip_low"] is None else min(max(w, 1 - o["clip_low"]), 1 + o["clip_high"])
    return v * a * new, v * a


def sapo_gate(w, a, new, o):
    tau = o["tau_pos"] if a > 0 else o["tau_neg"]
    sigmoid = 1 / (1 + math.exp(-tau * (w - 1)))
    return 4 / tau * sigmoid * a, 4 * sigmoid * (1 - sigmoid) * w * a


def run_gmpo(groups, o, correction=None):
    kept, rewards, seq, _, tokens = group_relative(groups, o)
    loss, grad, q = 0.0, zeros(groups), sum(kept)
    for g, group in enumerate(groups):
        for i, c in enumerate(group):
            if not kept[g] or masked(c, o):
                continue
            a, most = seq[g][i], o["log_clip"]
            logs = [n - b for n, b in zip(c["new"], c["old"], strict=True)]
            bounded = [min(x, most) if a > 0 else max(x, -most) for x in logs]
            factor = mean(correction_factors(c, correction)) / (q * len(group))
            value = a * math.exp(mean(bounded))
            loss -= factor * value
            for t in range(length(c)):
                grad[g][i][t] -= factor * value / length(c) if bounded[t] == logs[t] else 0.0
    return {
        "loss": loss,
        "grad": grad,
        "advantages": tokens,
        "seq_advantages": seq,
        "rewards": rewards,
    }


def run_gspo(groups, o, correction=None):
    kept, rewards, seq, _, tokens = group_relative(groups, o)
    loss, grad, ratios = sequence_loss(groups, seq, kept, o, "geometric", correction)
    return {
        "loss": loss,
        "grad": grad,
        "advantages": tokens,
        "seq_advantages": seq,
        "rewards": rewards,
        "ratios": ratios,
    }


def run_entropy_advantage(groups, o, correction=None):
    kept, rewards, seq, counted, tokens = group_relative(groups, o)
    for g, group in enumerate(groups):
        for i, c in enumerate(group):
            if kept[g] and not zeroed(group, o):
                limit = abs(seq[g][i]) / o["ent_kappa"]
                tokens[g][i] = [seq[g][i] + min(o["ent_alpha"] * h, limit) for h in c["H"]]
    omegas = token_omegas(groups, kept, counted, o)
    loss, grad, clipped = token_loss(groups, tokens, omegas, o, correction=correction)
    return {"loss": loss, "grad": grad, "advantages": tokens, "clipped": clipped}


def run_high_entropy_tokens(groups, o, correction=None):
    kept, _, _, counted, tokens = group_relative(groups, o)
    pool = sorted(h for g, group in enumerate(groups) if kept[g] for c in group for h in c["H"])
    tau = 0.0
    if pool:
        position = (1 - o["top_rho"]) * (len(pool) - 1)
        below = math.floor(position)
        above = min(below + 1, len(pool) - 1)
        tau = pool[below] + (position - below) * (pool[above] - pool[below])
    mask = [[[h >= tau for h in c["H"]] for c in group] for group in groups]
    if o["mask_denominator"] == "selected":
        counted = [
            [sum(mask[g][i]) if counted[g][i] else 0 for i in range(len(group))]
            for g, group in enumerate(groups)
        ]
    omegas = token_omegas(groups, kept, counted, o)
    loss, grad, clipped = token_loss(
        groups, tokens, omegas, o, token_mask=mask, correction=correction
    )
    return {"loss": loss, "grad": grad, "advantages": tokens, "tau": tau, "token_mask": mask}


def covariances(groups, kept, seq):
    entries = [
        (g, i, t)
        for g, group in enumerate(groups)
        if kept[g]
        for i, c in enumerate(group)
        for t in range(length(c))
    ]
    if not entries:
        return entries, {}
    mean_a = mean([seq[g][i] for g, i, _ in entries])
    mean_new = mean([groups[g][i]["new"][t] for g, i, t in entries])
    return entries, {
        (g, i, t): (seq[g][i] - mean_a) * (groups[g][i]["new"][t] - mean_new) for g, i, t in entries
    }


def run_clip_cov(groups, o, correction=None):
    kept, _, seq, counted, tokens = group_relative(groups, o)
    entries, cov = covariances(groups, kept, seq)
    candidates = []
    for g, i, t in entries:
        c = groups[g][i]
        _, _, cut = surrogate(math.exp(c["new"][t] - c["old"][t]), seq[g][i], o)
        if o["cov_lb"] < cov[g, i, t] < o["cov_ub"] and not cut:
            candidates.append((g, i, t))
    order = range(len(candidates)) if o["perm"] is None else o["perm"]
    k = max(1, int(o["cov_ratio"] * len(entries))) if entries else 0
    chosen = [candidates[j] for j in order][:k]
    omegas = token_omegas(groups, kept, counted, o)
    loss, grad, _ = token_loss(
        groups, tokens, omegas, o, correction=correction, removed=set(chosen)
    )
    return {
        "loss": loss,
        "grad": grad,
        "advantages": tokens,
        "cov": cov,
        "candidates": candidates,
        "chosen": chosen,
    }


def run_kl_cov(groups, o, correction=None):
    o = {**o, "clip_low": None, "dual_clip": None}
    kept, _, seq, counted, tokens = group_relative(groups, o)
    entries, cov = covariances(groups, kept, seq)
    k = max(1, int(o["cov_ratio"] * len(entries))) if entries else 0
    chosen = sorted(entries, key=lambda e: -cov[e])[:k]
    omegas = token_omegas(groups, kept, counted, o)
    loss, grad, _ = token_loss(
        groups, tokens, omegas, o, correction=correction, penalized=set(chosen)
    )
    return {"loss": loss, "grad": grad, "advantages": tokens, "cov": cov, "chosen": chosen}


def run_mixed(groups, o, correction=None):
    kept, _, seq, counted, tokens = group_relative(groups, o)
    omegas = token_omegas(groups, kept, counted, o)
    loss, grad, _ = token_loss(
        groups,
        tokens,
        omegas,
        o,
        correction=correction,
        ratio_base=lambda c: c["guide"] if c.get("behavior") == "guide" else c["old"],
    )
    if o["zero_batch"]:
        members = [
            (g, c, i)
            for g, group in enumerate(groups)
            if not partition(group, o)[0]
            for i, c in enumerate(group)
        ]
        total = sum(length(c) for _, c, _ in members)
        for g, c, i in members:
            for t in range(length(c)):
                v = math.exp(c["new"][t] - c["guide"][t])
                value, slope, _ = surrogate(v, -1.0, o, dual=False)
                loss -= o["zero_weight"] / total * value
                grad[g][i][t] -= o["zero_weight"] / total * slope * v
    return {"loss": loss, "grad": grad, "advantages": tokens}


# --- entropy shaping
# ------------------------------------------------------------------------------------------------


def prepared(h, o):
    if o["entropy_clamp"] is not None:
        h = min(max(h, o["entropy_clamp"][0]), o["entropy_clamp"][1])
    return h + (o["entropy_eps"] if o["eps_mode"] == "shift" else 0.0)


def eps_den(o):
    return o["entropy_eps"] if o["eps_mode"] == "denominator" else 0.0


def share(x, others, o):
    if o["normaliser"] == "geomean":
        return x / math.exp(mean([math.log(v) for v in others]))
    denominator = sum(others) + eps_den(o)
    return x / denominator * len(others) if denominator > 0 else 0.0


def token_shares(groups, members, quantity, o):
    """rho for member completions {(g, i)}; quantity(g, i, t) is H' or q."""
    rho = zeros(groups)
    for g, i in members:
        for t in range(length(groups[g][i])):
            if o["entropy_axis"] == "row":
                others = [quantity(g, i, s) for s in range(length(groups[g][i]))]
            else:
                same = [m for m in members if o["entropy_scope"] == "batch" or m[0] == g]
                if o["entropy_axis"] == "column":
                    others = [quantity(a, b, t) for a, b in same if length(groups[a][b]) > t]
                else:
                    others = [
                        quantity(a, b, s) for a, b in same for s in range(length(groups[a][b]))
                    ]
            rho[g][i][t] = share(quantity(g, i, t), others, o)
    return rho


def run_gtpo_entropy(groups, o, correction=None, kl=None):
    kept = kept_flags(groups, o)
    parts = [partition(group, o) for group in groups]
    p = [(g, i) for g in range(len(groups)) if kept[g] for i in parts[g][0]]
    n = [(g, i) for g in range(len(groups)) if kept[g] for i in parts[g][1]]
    version = o["version"]
    two = version in ("v2", "v6")
    clipped_positive = version == "v1u" or (version == "v2" and o["v2_positive"] == "v1u")

    def h(g, i, t):
        return prepared(groups[g][i]["H"][t], o)

    def q(g, i, t):
        return 1.0 / (max(h(g, i, t), o["inverse_floor"]) + eps_den(o))

    rho_pos = token_shares(groups, p, h, o)
    rho_neg = token_shares(groups, n, q, o) if two else zeros(groups)
    r_pos, r_neg = zeros(groups), zeros(groups)
    pens = [penalties(group, o) for group in groups]
    for g, i in p:
        c = groups[g][i]
        r = 1.0 if o["base_reward"] == "binary" else c["reward"]
        for t in range(length(c)):
            rho = rho_pos[g][i][t]
            if clipped_positive:
                value = min(
                    max(o["alpha1"] + o["alpha2"] * rho, 1.0),
                    o["alpha1"] + o["alpha1"] / o["kappa"],
                )
            elif version == "v6":
                value = o["alpha1"] * r + o["alpha2"] * rho
            else:
                value = r + o["alpha"] * rho
            r_pos[g][i][t] = value + pens[g][i]
    for g, i in n:
        for t in range(length(groups[g][i])):
            rho = rho_neg[g][i][t]
            if version == "v6":
                r_neg[g][i][t] = -o["alpha1"] - o["alpha2"] * rho + pens[g][i]
            elif version == "v2":
                r_neg[g][i][t] = -rho + pens[g][i]
            else:
                r_pos[g][i][t] = pens[g][i]

    def pool(table, own, g):
        members = [
            m
            for m in (own if o["adv_pool"] == "own" else p + n)
            if o["norm_scope"] == "batch" or m[0] == g
        ]
        values = [table[a][b][t] for a, b in members for t in range(length(groups[a][b]))]
        return (mean(values), std(values, o["ddof_tok"])) if values else (0.0, 0.0)

    advantages = zeros(groups)
    for members, table in ((p, r_pos), (n, r_neg if two else r_pos)):
        for g, i in members:
            mu, sd = pool(table, n if two and members is n else p, g)
            for t in range(length(groups[g][i])):
                a = (table[g][i][t] - mu) / (sd + o["adv_eps"])
                if o["sign_guard"]:
                    a = max(a, 0.0) if members is p else min(a, 0.0)
                advantages[g][i][t] = 0.0 if zeroed(groups[g], o) else a
    counted = [
        [0 if masked(c, o) or not kept[g] else length(c) for c in group]
        for g, group in enumerate(groups)
    ]
    omegas = token_omegas(groups, kept, counted, o)
    loss, grad, clipped = token_loss(groups, advantages, omegas, o, correction=correction, kl=kl)
    return {
        "loss": loss,
        "grad": grad,
        "advantages": advantages,
        "Rpos": r_pos,
        "Rneg": r_neg,
        "rho_pos": rho_pos,
        "rho_neg": rho_neg,
        "clipped": clipped,
    }


def run_grpo_s(groups, o, correction=None):
    kept = kept_flags(groups, o)
    parts = [partition(group, o) for group in groups]
    p = [(g, i) for g in range(len(groups)) if kept[g] for i in parts[g][0]]
    n = [(g, i) for g in range(len(groups)) if kept[g] for i in parts[g][1]]
    two = o["version"] in ("v2", "v6")
    h_hat = []
    for group in groups:
        row = []
        for c in group:
            values = [prepared(h, o) for h in c["H"]]
            if o["h_hat"] == "arithmetic":
                row.append(mean(values))
            else:
                row.append(
                    0.0 if min(values) <= 0 else math.exp(mean([math.log(v) for v in values]))
                )
        h_hat.append(row)

    def shares(members, x):
        out = {}
        for g, i in members:
            others = [x(a, b) for a, b in members if o["entropy_scope"] == "batch" or a == g]
            out[g, i] = share(x(g, i), others, o)
        return out

    s_pos = shares(p, lambda g, i: h_hat[g][i])
    s_neg = shares(n, lambda g, i: 1.0 / (h_hat[g][i] + eps_den(o))) if two else {}
    r_pos = [[0.0] * len(group) for group in groups]
    r_neg = [[0.0] * len(group) for group in groups]
    pens = [penalties(group, o) for group in groups]
    for g, i in p:
        r = 1.0 if o["base_reward"] == "binary" else groups[g][i]["reward"]
        if o["version"] == "v6":
            r_pos[g][i] = o["beta1"] * r + o["beta2"] * s_pos[g, i]
        else:
            r_pos[g][i] = r + o["beta"] * s_pos[g, i]
        r_pos[g][i] += pens[g][i]
    for g, i in n:
        if o["version"] == "v6":
            r_neg[g][i] = -o["beta1"] - o["beta2"] * s_neg[g, i] + pens[g][i]
        elif o["version"] == "v2":
            r_neg[g][i] = -s_neg[g, i] + pens[g][i]
        else:
            r_pos[g][i] = pens[g][i]

    seq = [[0.0] * len(group) for group in groups]
    for members, table in ((p, r_pos), (n, r_neg if two else r_pos)):
        for g, i in members:
            own = n if two and members is n else p
            pool = [
                m
                for m in (own if o["adv_pool"] == "own" else p + n)
                if o["norm_scope"] == "batch" or m[0] == g
            ]
            values = [table[a][b] for a, b in pool]
            if zeroed(groups[g], o) or not values:
                continue
            seq[g][i] = (table[g][i] - mean(values)) / (std(values, o["ddof_seq"]) + o["adv_eps"])
    loss, grad, ratios = sequence_loss(groups, seq, kept, o, o["w_hat"], correction)
    return {
        "loss": loss,
        "grad": grad,
        "seq_advantages": seq,
        "Rpos": r_pos,
        "Rneg": r_neg,
        "H_hat": h_hat,
        "ratios": ratios,
    }


# --- conflicts
# --------------------------------------------------------------------------------------------------


def conflict_mask(group, signs, i, backward, anchor):
    tokens = [c["tokens"][::-1] if backward else c["tokens"] for c in group]
    t_i = len(tokens[i])
    out = [False] * t_i
    if signs[i] == 0:
        return out
    begun = anchor == "start"
    for position in range(t_i):
        conflict = False
        for j in range(len(group)):
            if signs[j] * signs[i] < 0 and len(tokens[j]) > position:
                conflict = conflict or tokens[j][position] == tokens[i][position]
        if conflict:
            out[position] = True
            begun = True
        elif begun:
            break
    return out[::-1] if backward else out


def run_gtpo_conflict(groups, o, correction=None, kl=None):
    result = {
        key: []
        for key in ("A", "A_tilde", "delta", "lambda", "forward_mask", "backward_mask", "H_bar")
    }
    omegas = []
    for group in groups:
        rewards = [c["reward"] for c in group]
        mu = mean(rewards)
        a = [r - mu for r in rewards]
        if o["normalize_std"]:
            a = [x / (std(rewards, o["ddof_seq"]) + o["adv_eps"]) for x in a]
        a = [0.0 if abs(x) <= o["sign_tol"] else x for x in a]
        signs = [(x > 0) - (x < 0) for x in a]
        fw = [conflict_mask(group, signs, i, False, o["anchor"]) for i in range(len(group))]
        bw = [conflict_mask(group, signs, i, True, o["anchor"]) for i in range(len(group))]
        lam = []
        for i, c in enumerate(group):
            weight = {1: o["w_pos"], -1: 0.0, 0: 1.0}[signs[i]]
            row = []
            for t in range(length(c)):
                if not o["use_conflict"]:
                    row.append(1.0)
                elif o["overlap"] == "or":
                    row.append(weight if fw[i][t] or bw[i][t] else 1.0)
                else:
                    row.append((weight if fw[i][t] else 1.0) * (weight if bw[i][t] else 1.0))
            lam.append(row)
        h_bar = [mean(c["H"]) for c in group]
        active = o["filter"] != "off" and (o["h_ini"] is None or o["h_ini"] < LN2)
        delta, tilde, omega = [], [], []
        for i, c in enumerate(group):
            removed = (
                active and h_bar[i] > o["entropy_threshold"] and (o["filter"] == "all" or a[i] < 0)
            )
            delta.append(0.0 if removed else 1.0)
            value = delta[i] * (a[i] - o["gamma"] * h_bar[i])
            tilde.append(0.0 if o["zero_adv"] == "skip" and a[i] == 0 else value)
            weight = 1.0 / length(c)
            if o["group_reduce"] == "mean":
                weight /= len(group) * len(groups)
            if o["conflict_divisor"] == "max_run":
                weight /= max(1, sum(fw[i]), sum(bw[i]))
            omega.append(0.0 if masked(c, o) else weight)
        omegas.append(omega)
        for key, value in (
            ("A", a),
            ("A_tilde", tilde),
            ("delta", delta),
            ("lambda", lam),
            ("forward_mask", fw),
            ("backward_mask", bw),
            ("H_bar", h_bar),
        ):
            result[key].append(value)
    tokens = [
        [[result["A_tilde"][g][i]] * length(c) for i, c in enumerate(group)]
        for g, group in enumerate(groups)
    ]
    loss, grad, _ = token_loss(
        groups, tokens, omegas, o, factors=result["lambda"], correction=correction, kl=kl
    )
    return {**result, "loss": loss, "grad": grad, "advantages": tokens}


RUNNERS = {
    "grpo": run_group_relative,
    "dapo": run_group_relative,
    "dr_grpo": run_returns(lambda i, row, everyone, o: row[i] - mean(row)),
    "reinforce": run_returns(lambda i, row, everyone, o: row[i]),
    "reinforce_baseline": run_returns(lambda i, row, everyone, o: row[i] - mean(row)),
    "rloo": run_returns(
        lambda i, row, everyone, o: row[i] - (sum(row) - row[i]) / max(1, len(row) - 1)
    ),
    "group_norm": run_returns(
        lambda i, row, everyone, o: (row[i] - mean(row)) / (std(row, 1) + o["adv_eps"])
    ),
    "flash_reinforce": run_returns(lambda i, row, everyone, o: row[i] - mean(everyone)),
    "cispo": run_gated(cispo_gate),
    "gmpo": run_gmpo,
    "sapo": run_gated(sapo_gate),
    "gspo": run_gspo,
    "gtpo_entropy": run_gtpo_entropy,
    "grpo_s": run_grpo_s,
    "gtpo_conflict": run_gtpo_conflict,
    "entropy_advantage": run_entropy_advantage,
    "high_entropy_tokens": run_high_entropy_tokens,
    "clip_cov": run_clip_cov,
    "kl_cov": run_kl_cov,
    "mixed_policy_dapo": run_mixed,
    "on_policy_distillation": run_distillation,
}


def run(name: str, options: dict, groups: list, **extra) -> dict:
    """Loss, gradient and intermediate quantities of one algorithm on a batch of groups."""
    return RUNNERS[name](groups, options_of(name, options), **extra)
