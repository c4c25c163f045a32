"""Metrics of a batch after its step (rewards, texts, shaping, the mismatch between trainer and
engines), and the completions to show.

Shape suffixes: B = completions, N = response tokens of all completions, n = those of a block, Q =
groups, G = completions of a group.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf_ext.algorithms import Algorithm, LossBatch, RolloutBatch, mean_entropies
from openrlhf_ext.algorithms.kl import kl_k3
from openrlhf_ext.algorithms.segments import BLOCK_TOKENS, Segments, float64_sum
from openrlhf_ext.algorithms.values import explained_variance
from openrlhf_ext.driver.rollouts import Group, Prompt
from openrlhf_ext.driver.scoring import Scored
from openrlhf_ext.megatron.step.batch import LogprobEntropy
from openrlhf_ext.options.sections import HeldOutSet
from openrlhf_ext.reporting import chosen_groups
from openrlhf_ext.rewards.counting import accuracy
from openrlhf_ext.rewards.grading import FAILED_KEY
from openrlhf_ext.rollout.response import Response, graded

DEFAULT_BAND = (0.5, 5.0)  # importance ratios; the default of OpenRLHF's correction


def describe(
    scored: Scored, shaped: LossBatch, old: LogprobEntropy, algorithm: Algorithm, version: int
) -> tuple[RolloutBatch, dict[str, float]]:
    """Returns the batch as the policy saw it before the step, and metrics under the names of
    docs/metrics.md.

    Args:
        old: log-probs and entropies before the step, under the policy with weights ``version``.
    """
    rollout, of_method = _as_seen(scored, shaped, old, algorithm)
    samples = scored.samples
    seen = rollout.rows(scored.seen_before)
    metrics = batch_metrics(rollout) | entropy_metrics(seen)
    metrics |= policy_mismatch(seen, correction_band(algorithm))
    metrics |= conflict_gauges(rollout, shaped)
    metrics |= {f"algorithm/{name}": float(value) for name, value in of_method.items()}
    if scored.engine_entropies and scored.rollout.entropies is not None:
        told = scored.rollout.rows(scored.seen_before)
        gap_n = (told["entropies"] - seen["entropies"]).abs().double()
        metrics["mismatch/entropy_mean_abs"] = float(gap_n.mean())
        # show what shaped the batch
        rollout = dataclasses.replace(rollout, entropies=scored.rollout.entropies)
    if rollout.ref_logprobs is not None:
        metrics["kl/reference"] = reference_kl(seen["old_logprobs"], seen["ref_logprobs"])
    metrics |= guide_agreement(rollout) | guide_gauges(samples)
    metrics |= reward_metrics(samples) | staleness_metrics(samples, version)
    if rollout.values is not None:
        metrics |= value_metrics(shaped)
    rewards = [graded(sample.reward) for sample in samples]
    moved_B = (rollout.rewards - torch.tensor(rewards).double()).abs()
    metrics["mismatch/rewards"] = float(moved_B.max())
    group_size = len(scored.groups[0].responses)
    metrics |= advantage_gauges(shaped, group_size, rewards)
    if not algorithm.needs_prepare:
        first = shaped.mini_batch(scored.chunks[0])
        metrics |= expected_of_first_update(first, old.logprobs_N)
        metrics |= _expected_reference(first, old.logprobs_N, algorithm)
    return rollout, metrics


def _as_seen(
    scored: Scored, shaped: LossBatch, old: LogprobEntropy, algorithm: Algorithm
) -> tuple[RolloutBatch, Mapping[str, Tensor]]:
    """Returns the batch with the policy's numbers, and the method's own metrics. If the training
    pass computed these numbers, the method computes the metrics that depend on them now."""
    rollout = dataclasses.replace(
        scored.rollout, old_logprobs=old.logprobs_N, entropies=old.entropies_N
    )
    if scored.source == "policy":
        return rollout, shaped.metrics
    measured_by = rollout
    if scored.source == "engine":
        measured_by = dataclasses.replace(measured_by, old_logprobs=scored.rollout.old_logprobs)
    if scored.engine_entropies:
        measured_by = dataclasses.replace(measured_by, entropies=scored.rollout.entropies)
    rows = scored.seen_before
    measured = algorithm.measured(measured_by.rows(rows), shaped.select(rows))
    return rollout, measured | shaped.metrics


def _expected_reference(
    first: LossBatch, logprobs_N: Tensor, algorithm: Algorithm
) -> dict[str, float]:
    """Returns the reference KL that ranks should report for the first update."""
    mask_N = first.loss_mask
    if first.ref_logprobs is None or algorithm.penalty.estimator != "k3" or not mask_N.any():
        return {}
    old_n = logprobs_N[: len(mask_N)][mask_N]
    return {"expected/ref_kl": reference_kl(old_n, first.ref_logprobs[mask_N])}


# ---- the batch


def batch_metrics(rollout: RolloutBatch) -> dict[str, float]:
    """Returns means over the rollout batch under the names of docs/metrics.md."""
    rewards = rollout.rewards.float()
    tokens = len(rollout.tokens)
    metrics: dict[str, float | Tensor] = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(correction=0),
        "response/length_mean": tokens / len(rewards),
        "tokens/generated": tokens,
    }
    if rollout.truncated is not None:
        metrics["response/truncated_rate"] = rollout.truncated.float().mean()
    return {name: float(value) for name, value in metrics.items()}


def entropy_metrics(rollout: RolloutBatch) -> dict[str, float]:
    """Returns means of the policy's entropies over a batch, and how they go with its surprise."""
    entropies_N, segments = rollout["entropies"], rollout.segments
    means_B = mean_entropies(entropies_N, segments)
    return {
        "entropy/mean": float(float64_sum(entropies_N)) / len(entropies_N),
        "entropy/completion_mean": float(means_B.mean()),
        "entropy/surprise_correlation": -_correlation(
            entropies_N, rollout["old_logprobs"], segments
        ),
    }


def _correlation(one_N: Tensor, other_N: Tensor, segments: Segments) -> float:
    """Returns the correlation of two values per token; 0 if either value is constant."""
    sums = torch.zeros(5, dtype=torch.float64)
    for block in segments.blocks():
        x_n = one_N[block.tokens].double()
        y_n = other_N[block.tokens].double()
        sums += torch.stack([x_n.sum(), y_n.sum(), x_n @ x_n, y_n @ y_n, x_n @ y_n])
    x, y, xx, yy, xy = (sums / max(1, segments.tokens)).tolist()
    spread = math.sqrt(max(0.0, (xx - x * x) * (yy - y * y)))
    return (xy - x * y) / spread if spread > 1e-12 else 0.0


def conflict_gauges(rollout: RolloutBatch, shaped: LossBatch) -> dict[str, float]:
    """Returns gauges of conflicts among a prompt's completions (Simoni et al., arXiv 2508.03772).

    ``conflict/mean`` (fig. 5b; the paper does not state its unit): mean over completions of the
    number of tokens in a conflict span, for ``gtpo_conflict`` only. ``conflict/prefix_*`` (eq. 6),
    for any method: completions of a prompt that begin with the same token share a prefix, whose
    gradient carries the sum of A_i / |o_i| over them. The gauges are the mean of these sums over
    prefixes that positive and negative completions share, and the fraction of these prefixes with a
    negative sum, where GRPO makes the start of good completions less likely. Missing if there is no
    such prefix.
    """
    metrics = {}
    masks = [
        shaped.of_tokens[name]
        for name in ("forward_mask", "backward_mask")
        if name in shaped.of_tokens
    ]
    if masks:
        metrics["conflict/mean"] = float(torch.stack(masks).any(0).sum() / len(rollout.rewards))
    a_B = shaped.of_rows["A"] if "A" in shaped.of_rows else _group_relative(rollout)
    lengths_B = rollout.segments.lengths_B
    first_B = rollout.tokens[lengths_B.cumsum(0) - lengths_B]
    beginnings = torch.stack([rollout.group_ids, first_B.to(rollout.group_ids.dtype)], 1)
    prefixes, of_B = beginnings.unique(dim=0, return_inverse=True)
    zeros = torch.zeros(len(prefixes), dtype=torch.float64)
    sums = zeros.index_add(0, of_B, a_B / lengths_B)
    positive = zeros.index_add(0, of_B, (a_B > 0).double())
    negative = zeros.index_add(0, of_B, (a_B < 0).double())
    has_both = positive.gt(0) & negative.gt(0)
    if bool(has_both.any()):
        metrics["conflict/prefix_advantage"] = float(sums[has_both].mean())
        metrics["conflict/prefix_penalized"] = float((sums[has_both] < 0).double().mean())
    return metrics


def _group_relative(rollout: RolloutBatch) -> Tensor:
    """Returns (B,) float64 (r_i - mean r) / std r over the completions of a prompt, 0 where all
    rewards are equal (eq. 12)."""
    _, index_B, sizes_Q = rollout.group_ids.unique(return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(sizes_Q), dtype=torch.float64)
    rewards_B = rollout.rewards.double()
    means_Q = zeros.index_add(0, index_B, rewards_B) / sizes_Q
    centered_B = rewards_B - means_Q[index_B]
    squares_Q = zeros.index_add(0, index_B, centered_B.square())
    std_Q = (squares_Q / (sizes_Q - 1).clamp(min=1)).sqrt()
    return torch.where(centered_B.abs() <= 1e-8, 0.0, centered_B / std_Q.clamp(min=1e-8)[index_B])


def reward_metrics(samples: Sequence[Response]) -> dict[str, float]:
    """Returns accuracy, mean score, the mean of every number that the reward function returned in
    ``extra_logs``, and the number of ungraded samples."""
    numbers: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, number in sample.extra_logs.items():
            numbers[name].append(number)
    failures = sum(numbers.pop(FAILED_KEY, [0.0]))
    logs = {f"reward_log/{name}": statistics.fmean(numbers[name]) for name in sorted(numbers)}
    scores = [graded(sample.score) for sample in samples]
    logs |= {"accuracy/mean": accuracy(scores), "score/mean": sum(scores) / len(scores)}
    return logs | {"reward/failures": failures}


def text_metrics(
    prompts: Sequence[str], samples: Sequence[Response], tokenizer: Any, end_tokens: Collection[int]
) -> dict[str, float]:
    """Returns the mean prompt length, the fraction of prompts that the engines saw with other
    tokens, and the fractions of distinct completions and of uncut ones that end in one of
    ``end_tokens``. ``samples`` has equally many of each prompt."""
    each = len(samples) // len(prompts)
    changed = 0
    for prompt, response in zip(prompts, samples[::each], strict=True):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        changed += response.tokens_S[: response.actions[0][0]].tolist() != ids
    whole = [response for response in samples if not response.truncated]
    ended = sum(
        int(response.tokens_S[response.actions[-1][1] - 1]) in end_tokens for response in whole
    )
    lengths = sum(response.actions[0][0] for response in samples)
    distinct = {
        (number // each, response.tokens_S.tobytes()) for number, response in enumerate(samples)
    }
    metrics = {
        "prompts/length_mean": lengths / len(samples),
        "prompts/changed": changed / len(prompts),
        "response/distinct": len(distinct) / len(samples),
    }
    if whole:
        metrics["response/ended"] = ended / len(whole)
    return metrics


def staleness_metrics(samples: Sequence[Response], version: int) -> dict[str, float]:
    """Returns by how many weight updates the policy, now at ``version``, is ahead of the weights
    that sampled each token. Empty if any response lacks its versions."""
    samples = [sample for sample in samples if not sample.from_guide]
    if not all(sample.versions for sample in samples):
        return {}
    ages: set[int] = set()
    total = tokens = mixed = 0
    for sample in samples:
        own = {version - then for then, _, _ in sample.versions}
        ages |= own
        mixed += len(own) > 1
        for then, start, stop in sample.versions:
            total += (version - then) * (stop - start)
            tokens += stop - start
    return {
        "staleness/mean": total / tokens,
        "staleness/max": float(max(ages)),
        "staleness/mixed_fraction": mixed / len(samples),
    }


# ---- what was shaped against what is trained


def advantage_gauges(
    shaped: LossBatch, group_size: int, rewards: Sequence[float]
) -> dict[str, float]:
    """Returns gauges that compare the advantages of completions with their rewards. The batch keeps
    the ``group_size`` completions of a prompt together.

    The gauges: the correlation of advantages and rewards, both centered on the group's mean
    (missing if either does not vary), the absolute mean advantage of a group, and the RMS of the
    centered advantages in groups with unequal rewards.
    """
    segments = shaped.segments
    sums_B = torch.cat(
        [block.sums(shaped.advantages[block.tokens].double()) for block in segments.blocks()]
    )
    kept_QG = shaped.kept.view(-1, group_size)
    a_QG = (sums_B / segments.lengths_B.clamp(min=1)).view(-1, group_size)
    r_QG = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    a_QG = torch.where(kept_QG, a_QG, 0.0)
    r_QG = torch.where(kept_QG, r_QG, 0.0)
    gauges = {"advantage/group_mean_abs": float(a_QG.mean(1).abs().mean())}
    a_QG = a_QG - a_QG.mean(1, keepdim=True)
    r_QG = r_QG - r_QG.mean(1, keepdim=True)
    unequal_Q = r_QG.abs().amax(1) > 0
    if bool(unequal_Q.any()):
        gauges["advantage/group_rms"] = float(a_QG[unequal_Q].square().mean(1).sqrt().mean())
    if (spread := float((a_QG.square().sum() * r_QG.square().sum()).sqrt())) > 0:
        gauges["advantage/reward_correlation"] = float((a_QG * r_QG).sum()) / spread
    return gauges


def expected_of_first_update(mini_batch: LossBatch, logprobs_N: Tensor) -> dict[str, float]:
    """Returns the values that ranks should report for the first update. ``mini_batch`` holds the
    first rows of a batch, and ``logprobs_N`` the policy's log-probs of that batch before the
    update. Works in blocks of rows: a batch may have tens of millions of tokens."""
    totals = {"expected/loss": 0.0, "expected/alignment": 0.0}
    for block in mini_batch.segments.blocks():
        share = mini_batch.select(block.rows)
        loss = mini_batch.algorithm.loss(logprobs_N[block.tokens].double(), share)
        totals["expected/loss"] += float(loss.value)
        totals["expected/alignment"] += float(loss.metrics.get("alignment", math.nan))
    return totals


def recounted(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a step, with the ranks' reports of their first update and the expected
    values replaced by their differences."""
    kept = {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("first/", "expected/"))
    }
    for gauge, of in (
        ("mismatch/loss", "loss"),
        ("mismatch/trained", "alignment"),
        ("mismatch/reference", "ref_kl"),
    ):
        first = metrics.get(f"first/{of}")
        expected = metrics.get(f"expected/{of}")
        if first is not None and expected is not None:
            kept[gauge] = abs(first - expected)
    return kept


# ---- trainer against engines


def mismatch_gauges(
    policy_N: Tensor,
    rollout_N: Tensor,
    segments: Segments,
    band: tuple[float, float] = DEFAULT_BAND,
) -> dict[str, float]:
    """Returns how far the policy's log-probs before the step are from those of the engines.

    With d = policy - rollout and w = exp(d), both KL estimators have the right mean over tokens
    sampled from the engines and are never negative: k3 of KL(rollout || policy) is w - 1 - d, and
    k3 of KL(policy || rollout), weighted by w, is w (1/w - 1 + d) = 1 - w + w d. Also counts the
    ratios outside of ``band``: an importance correction with these thresholds drops or clamps them.
    """
    if not segments.tokens:
        return {}
    blocks = []
    sequences = []
    for block in segments.blocks():
        d_n = policy_N[block.tokens].double() - rollout_N[block.tokens]
        sequences.append(block.sums(d_n))
        blocks.append(_block_sums(d_n, band))
    sums = torch.stack(blocks)
    forward, reverse, absolute, outside = (sums[:, :4].sum(0) / segments.tokens).tolist()
    log_sum = sums[:, 5].logsumexp(0)
    log_sum_of_squares = sums[:, 6].logsumexp(0)
    return {
        "kl/rollout": forward,
        "kl/rollout_reverse": reverse,
        "kl/rollout_max_abs": float(sums[:, 4].max()),
        "mismatch/mean_abs": absolute,
        "mismatch/exp_mean_abs": math.exp(absolute),
        "mismatch/ess_tokens": _effective_fraction(log_sum, log_sum_of_squares, segments.tokens),
        "mismatch/ess_completions": effective_sample_fraction(
            torch.cat(sequences)[segments.lengths_B > 0]
        ),
        "mismatch/outside_band": outside,
    }


def _block_sums(d_n: Tensor, band: tuple[float, float]) -> Tensor:
    """Returns (7,) values of a block's d: the sums of both KL terms, of |d|, and of ratios outside
    the band; the largest |d|; the logarithms of the sums of w and of w squared."""
    if not len(d_n):
        return d_n.new_tensor([0.0, 0.0, 0.0, 0.0, 0.0, -math.inf, -math.inf])
    largest = d_n.max()
    low, high = band
    relative_n = (d_n - largest).exp_()  # at most 1: its sums do not overflow
    w_n = relative_n * largest.exp()
    abs_n = d_n.abs()
    outside = (len(d_n) - ((w_n >= low) & (w_n <= high)).sum()).double()
    logs = largest + relative_n.sum().log(), 2 * largest + relative_n.square_().sum().log()
    return torch.stack(
        [
            (w_n - 1 - d_n).sum(),
            (1 - w_n + w_n * d_n).sum(),
            abs_n.sum(),
            outside,
            abs_n.max(),
            *logs,
        ]
    )


def policy_mismatch(
    rollout: RolloutBatch, band: tuple[float, float] = DEFAULT_BAND
) -> dict[str, float]:
    """Returns ``mismatch_gauges`` of the policy's completions; those of a guide differ on purpose.
    Empty if an engine reported no log-probs."""
    guide_B = rollout.from_guide
    engines_N = rollout.rollout_logprobs
    segments = rollout.segments
    if engines_N is None:
        return {}
    rows = slice(None) if guide_B is None or not bool(guide_B.any()) else ~guide_B
    policy_N = segments.take(rollout["old_logprobs"], rows)
    engines_N = segments.take(engines_N, rows)
    return mismatch_gauges(policy_N, engines_N, segments.select(rows), band)


def correction_band(algorithm: Algorithm) -> tuple[float, float]:
    """Returns the ratios that the algorithm's importance correction keeps, or the default band if
    the correction does not gate tokens by ratio."""
    correction = algorithm.correction
    if correction is None or (correction.level, correction.gating) != ("token", "ratio"):
        return DEFAULT_BAND
    return correction.threshold


def effective_sample_fraction(log_weights: Tensor) -> float:
    """Returns effective sample size over number of samples: (sum w)^2 / (n sum w^2), 1 if all
    weights are equal."""
    return _effective_fraction(
        log_weights.logsumexp(0), (2 * log_weights).logsumexp(0), len(log_weights)
    )


def _effective_fraction(log_sum: Tensor, log_sum_of_squares: Tensor, count: int) -> float:
    return float((2 * log_sum - log_sum_of_squares - math.log(count)).exp())


# ---- the guide


def guide_gauges(samples: Sequence[Response]) -> dict[str, float]:
    """Returns gauges of the guide's and the policy's completions; empty if the guide does not
    sample."""
    if not any(sample.from_guide for sample in samples):
        return {}
    gauges = {"guide/fraction": sum(sample.from_guide for sample in samples) / len(samples)}
    for source, is_guide in (("guide", True), ("policy", False)):
        own = [sample for sample in samples if sample.from_guide == is_guide]
        gauges[f"{source}/reward_mean"] = sum(graded(sample.reward) for sample in own) / len(own)
        gauges[f"{source}/accuracy_mean"] = accuracy([graded(sample.score) for sample in own])
        gauges[f"{source}/length_mean"] = sum(sample.sampled for sample in own) / len(own)
    return gauges


def guide_agreement(rollout: RolloutBatch) -> dict[str, float]:
    """Returns the largest difference between the log-probs of the guide's ranks and engines on the
    guide's completions; empty if there are none."""
    rows = rollout.from_guide
    ranks_N = rollout.guide_logprobs
    engines_N = rollout.rollout_logprobs
    if rows is None or not bool(rows.any()) or ranks_N is None or engines_N is None:
        return {}
    ranks_n = rollout.segments.take(ranks_N, rows)
    engines_n = rollout.segments.take(engines_N, rows)
    return {"guide/rollout_max_abs": float((ranks_n - engines_n).abs().max())}


def value_metrics(shaped: LossBatch) -> dict[str, float]:
    """Returns means over completion tokens under the names of docs/metrics.md;
    ``explained_variance`` only if it is defined."""
    values_N = shaped["values"]
    returns_N = shaped["returns"]
    metrics = {
        "value/mean": float(float64_sum(values_N)) / len(values_N),
        "value/return_mean": float(float64_sum(returns_N)) / len(values_N),
    }
    explained = explained_variance(values_N, returns_N)
    if explained is not None:
        metrics["value/explained_variance"] = float(explained)
    return metrics


def reference_kl(old_logprobs_N: Tensor, ref_logprobs_N: Tensor) -> float:
    """Returns the mean over completion tokens of the k3 estimate of KL(policy || reference), nats.
    The policy sampled the tokens."""
    blocks = zip(
        old_logprobs_N.split(BLOCK_TOKENS), ref_logprobs_N.split(BLOCK_TOKENS), strict=True
    )
    total = sum(float(kl_k3(old_n.double(), ref_n.double()).sum()) for old_n, ref_n in blocks)
    return total / len(old_logprobs_N)


_SHOWN = {
    "old_logprobs": "logprobs",
    "rollout_logprobs": "rollout_logprobs",
    "entropies": "entropies",
    "ref_logprobs": "ref_logprobs",
    "guide_logprobs": "guide_logprobs",
    "values": "values",
}


_HELD_OUT_COMPLETIONS = 4  # shown of a held-out prompt


def shown_samples(
    scored: Scored, rollout: RolloutBatch, shaped: LossBatch, most: int
) -> list[dict[str, Any]]:
    """Returns the completions of at most ``most`` groups in the form that ``SampleWriter`` takes.
    The prompts' digests choose them: of prompts that come again, the same ones are shown again."""
    groups = scored.groups
    order = sorted(range(len(groups)), key=lambda position: groups[position].prompt.entry[::-1])
    written = []
    for position in order:
        written.append(sum(response.written for response in groups[position].responses))
    starts = np.cumsum([0] + [len(group.responses) for group in groups])
    of_tokens = {key: getattr(rollout, name) for name, key in _SHOWN.items()}
    of_tokens |= {
        "advantages": shaped.advantages,
        "loss_mask": shaped.loss_mask.int(),
        "token_weights": shaped.token_weights,
    }
    updates_B = np.zeros(len(rollout.rewards), int)
    if scored.old is None:  # each update computes the log-probs of its own rows
        for number, rows in enumerate(scored.chunks):
            updates_B[rows] = number
    shown = []
    for place in chosen_groups(written, most):
        position = order[place]
        prompt = groups[position].prompt
        for row, response in enumerate(groups[position].responses, start=int(starts[position])):
            span = rollout.segments.span(slice(row, row + 1))
            facts = _facts(prompt.number, prompt, response)
            if updates_B[row]:
                facts["updates"] = int(updates_B[row])
            numbers = {
                key: _spread(values_N[span], response.sampled_T)
                for key, values_N in of_tokens.items()
                if values_N is not None
            }
            shown.append(facts | numbers)
    return shown


def held_out_samples(
    sets: Sequence[HeldOutSet], groups: Sequence[Sequence[Group]], most: int
) -> list[dict[str, Any]]:
    """Returns the first completions of the first ``most`` prompts of each held-out set (0 = of
    all), as many as fit, in the form that ``SampleWriter`` takes. No policy has computed their
    log-probs."""
    found = [
        (f"{options.name} {group.prompt.number}".strip(), group.prompt, response)
        for options, own in zip(sets, groups, strict=True)
        for group in own[: most or None]
        for response in group.responses[:_HELD_OUT_COMPLETIONS]
    ]
    shown = []
    for place in chosen_groups([response.written for *_, response in found], len(found)):
        response = found[place][2]
        told = {"rollout_logprobs": response.logprobs_T, "entropies": response.entropies_T}
        numbers = {
            key: _spread(torch.from_numpy(values_n), response.sampled_T)
            for key, values_n in told.items()
            if values_n is not None
        }
        shown.append(_facts(*found[place]) | numbers)
    return shown


def _facts(group: int | str, prompt: Prompt, response: Response) -> dict[str, Any]:
    """Returns everything about a completion but the numbers of its tokens."""
    own_T = response.sampled_T
    facts = {
        "group": group,
        "prompt": prompt.text,
        "token_ids": response.tokens_S[-len(own_T) :].tolist(),
        "reward": response.reward,
        "score": response.score,
        "truncated": response.truncated,
        "from_guide": response.from_guide,
        **_label(prompt.label),
    }
    if not own_T.all():
        facts["environment"] = (~own_T).astype(int).tolist()
    return facts


def _spread(values_n: Tensor, own_T: np.ndarray) -> list[Any]:
    """Returns one number per token: ``values_n`` for tokens that the policy sampled, 0 for tokens
    that an agent's environment wrote."""
    spread_T = values_n.new_zeros(len(own_T))
    spread_T[torch.from_numpy(own_T)] = values_n
    return spread_T.tolist()


def _label(label: Any) -> dict[str, Any]:
    """Returns the label that grading received, as text if JSON cannot hold it; empty if there is
    none."""
    if label is None or label == "":  # "": OpenRLHF's, without data.label_key
        return {}
    try:
        json.dumps(label, allow_nan=False)
    except (TypeError, ValueError):
        return {"label": str(label)}
    return {"label": label}
