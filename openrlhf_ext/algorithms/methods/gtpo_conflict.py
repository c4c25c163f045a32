"""`gtpo_conflict`: tokens shared by good and bad completions keep their positive signal and lose
the negative one.

M. Simoni et al., "GTPO: Stabilizing Group Relative Policy Optimization via Gradient and Entropy
Control", arXiv 2508.03772.

Shape suffixes: B = completions, N = tokens of all completions, Q = groups, n = tokens of one block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from openrlhf_ext.algorithms import (
    Inputs,
    LossBatch,
    RolloutBatch,
    TokenAlgorithm,
    losses,
    mean_entropies,
    option,
    register_algorithm,
)
from openrlhf_ext.algorithms.base import Derived
from openrlhf_ext.algorithms.conflict_mask import Spans, conflict_spans
from openrlhf_ext.algorithms.groups import Groups, Partition, usable_rows
from openrlhf_ext.algorithms.losses import group_advantages
from openrlhf_ext.algorithms.option_blocks import (
    ClipIntervalOptions,
    Ddof,
    EpsOptions,
    TruncationOptions,
    clip_high,
    clip_low,
)
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.options import Float, Int, no_effect

LN2 = math.log(2.0)


def conflict_weights(
    forward_N: Tensor,
    backward_N: Tensor,
    segments: Segments,
    sign_B: Tensor,
    options: Any,
    dtype: torch.dtype,
) -> Tensor:
    """lambda of eq. 9: `w_pos` on conflicts of positive completions, 0 on conflicts of negative
    ones, else 1."""
    weight_B = torch.where(
        sign_B > 0, options.w_pos, torch.where(sign_B < 0, 0.0, 1.0).to(torch.float64)
    ).to(dtype)
    one = torch.ones((), dtype=dtype, device=sign_B.device)
    lambda_N = torch.empty(forward_N.shape, dtype=dtype, device=sign_B.device)
    for block in segments.blocks():
        forward_n, backward_n = forward_N[block.tokens], backward_N[block.tokens]
        weight_n = block.spread(weight_B[block.rows])
        if options.overlap == "or":
            lambda_N[block.tokens] = torch.where(forward_n | backward_n, weight_n, one)
        else:
            product_n = torch.where(forward_n, weight_n, one) * torch.where(
                backward_n, weight_n, one
            )
            lambda_N[block.tokens] = product_n
    return lambda_N


FILTER_ANYWAY = "to filter all the same leave h_ini out and set initial_entropy_prompts 0"


class GtpoConflictOptions(TruncationOptions, EpsOptions, ClipIntervalOptions):
    preset: Literal["paper", "official"] = option(
        "paper", "defaults of the paper or of its released code"
    )
    gamma: Float = option(0.1, "entropy regularizer", ge=0)
    entropy_threshold: Float = option(
        LN2, "filter level of a completion's mean entropy, nats", ge=0
    )
    h_ini: Float | None = option(
        None, "initial entropy, nats; null: filter always on; a number: on only below ln 2", ge=0
    )
    initial_entropy_prompts: Int = option(
        100, "prompts over which a run that is not given h_ini measures it; 0 = it does not", ge=0
    )
    filter: Literal["all", "only_neg", "off"] = option("all", "who the entropy filter removes")
    use_conflict: bool = option(True, "false: lambda is 1 everywhere")
    w_pos: Float = option(2.0, "lambda of conflict tokens of positive completions", ge=0)
    anchor: Literal["start", "first"] = option(
        "start", "conflict spans begin at the first/last token, or anywhere"
    )
    overlap: Literal["or", "product"] = option(
        "or", "tokens in both spans: one weight, or the product of both"
    )
    zero_adv: Literal["literal", "skip"] = option(
        "literal", "A = 0 completions get -gamma <H>, or nothing"
    )
    conflict_divisor: Literal["none", "max_run"] = option(
        "none", "divide a completion by its longer conflict run"
    )
    group_reduce: Literal["mean", "sum"] = option(
        "mean", "mean over completions and prompts, or sum"
    )
    normalize_std: bool = option(True, "divide by the group's standard deviation")
    ddof_seq: Ddof = option(1, "std over sequences: 1 sample, 0 population")
    sign_tol: Float = option(1e-8, "|A| at or below this is 0", ge=0)
    clip_low: Float | None = clip_low(None)
    clip_high: Float | None = clip_high(None)

    OFFICIAL: ClassVar[dict[str, Any]] = {
        "normalize_std": False,
        "entropy_threshold": 0.7,
        "h_ini": None,
        "overlap": "product",
        "conflict_divisor": "max_run",
        "group_reduce": "sum",
        "gamma": 0.1,
        "w_pos": 2.0,
    }

    @model_validator(mode="before")
    @classmethod
    def _of_the_preset(cls, values: Any) -> Any:
        """Replace defaults by the preset; given values other than null override it."""
        if not isinstance(values, Mapping) or values.get("preset") != "official":
            return values
        return cls.OFFICIAL | {name: value for name, value in values.items() if value is not None}

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        if self.clip_low is None and self.clip_high is not None:
            yield no_effect("clip_high", self.clip_high, "without clip_low nothing is clipped")
        if self.h_ini is not None and self.h_ini >= LN2 and self.filter != "off":
            yield no_effect(
                "filter", self.filter, f"h_ini {self.h_ini:g} is not below ln 2", FILTER_ANYWAY
            )


@register_algorithm("gtpo_conflict", GtpoConflictOptions)
class GtpoConflict(TokenAlgorithm):
    """Group-relative Trajectory-based Policy Optimization (Simoni et al.): tokens that correct and
    wrong completions share are not punished, completions of high entropy are left out, and entropy
    lowers the advantage.

        A_i = (r_i - mean r)/(std r + adv_eps)                                          eq. 12
        lambda_it = w_pos (A_i > 0) or 0 (A_i < 0) where token t is in conflict, else 1 eq. 9
        delta_i = 0 if the entropy filter removes the completion, else 1                eq. 10
        A~_i = delta_i (A_i - gamma <H>_i)                                              eq. 11, 30
        J = 1/G sum_i 1/T_i sum_t lambda_it w_it A~_i                                   eq. 11
    """

    needs = ("entropies",)
    # An extension: the paper trains without a KL. The option lets a user test its claim that none
    # is needed.
    kl_places = ("loss",)

    def partition(self, batch: RolloutBatch, groups: Groups) -> Partition:
        """Classes by the sign of A; no group is dropped or zeroed."""
        sign_B = self._advantages(batch, groups).sign()
        no_one_B = torch.zeros_like(sign_B, dtype=torch.bool)
        return Partition(
            success_B=sign_B > 0,
            failure_B=sign_B < 0,
            degenerate_Q=~groups.any(sign_B != 0),
            kept_B=~no_one_B,
            zeroed_B=no_one_B,
            active_B=usable_rows(batch, self.options.mask_truncated),
        )

    def _advantages(self, batch: RolloutBatch, groups: Groups) -> Tensor:
        """(B,) float64 A_i; values within `sign_tol` of 0 are 0."""
        everyone_B = torch.ones_like(groups.index_B, dtype=torch.bool)
        a_B = group_advantages(batch.rewards, groups, self.options, everyone_B)
        return torch.where(a_B.abs() <= self.options.sign_tol, 0.0, a_B)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        batch, groups, options = inputs.batch, inputs.groups, self.options
        a_B = self._advantages(batch, groups)
        sign_B = a_B.sign()
        forward = conflict_spans(
            batch.tokens, groups, sign_B, backward=False, anchor=options.anchor
        )
        backward = conflict_spans(
            batch.tokens, groups, sign_B, backward=True, anchor=options.anchor
        )
        forward_N, backward_N = (spans.mask(batch.segments) for spans in (forward, backward))
        h_bar_B = mean_entropies(batch["entropies"], batch.segments)
        delta_B = self._delta(a_B, h_bar_B)
        tilde_B = delta_B * (a_B - options.gamma * h_bar_B)
        if options.zero_adv == "skip":
            tilde_B = torch.where(a_B == 0, 0.0, tilde_B)
        lambda_N = None
        if options.use_conflict:
            lambda_N = conflict_weights(
                forward_N, backward_N, batch.segments, sign_B, options, batch.float_dtype
            )
        return {
            "advantages": batch.segments.spread(tilde_B.to(batch.float_dtype)),
            "seq_advantages": tilde_B,
            "token_weights": lambda_N,
            "exposed": {
                "A": a_B,
                "delta": delta_B,
                "H_bar": h_bar_B,
                "forward_mask": forward_N,
                "backward_mask": backward_N,
                "divisor": self._divisor(forward, backward),
            },
            "metrics": _conflict_metrics(groups, forward, backward, delta_B),
        }

    def _delta(self, a_B: Tensor, h_bar_B: Tensor) -> Tensor:
        """(B,) float64 entropy filter of eq. 10: 0 removes a completion."""
        options = self.options
        active = options.filter != "off" and (options.h_ini is None or options.h_ini < LN2)
        if not active:
            return torch.ones_like(a_B)
        removed_B = h_bar_B > options.entropy_threshold
        if options.filter == "only_neg":
            removed_B = removed_B & (a_B < 0)
        return (~removed_B).to(a_B.dtype)

    def _divisor(self, forward: Spans, backward: Spans) -> Tensor:
        """(B,) float64 factor that divides a completion's loss (`conflict_divisor`)."""
        longest_B = torch.maximum(forward.count_B, backward.count_B).clamp(min=1).to(torch.float64)
        return (
            longest_B if self.options.conflict_divisor == "max_run" else torch.ones_like(longest_B)
        )

    def loss_level(self, shaped: LossBatch) -> LossBatch:
        loss_mask_N = self.loss_mask(shaped)
        denominator_B = shaped.lengths * shaped["divisor"]
        if self.options.group_reduce == "mean":
            denominator_B = denominator_B * shaped.group_sizes * losses.prompts(shaped)
        return dataclasses.replace(
            shaped,
            loss_mask=loss_mask_N,
            weights=losses.reciprocal(denominator_B, shaped.active),
            denominators={"tokens": self.loss_tokens(shaped, loss_mask_N).sum().to(torch.float64)},
            complete=True,
        )

    def derived(self) -> Derived:
        return {
            "A_tilde": lambda shaped: shaped["seq_advantages"],
            "lambda": lambda shaped: (
                torch.ones_like(shaped.advantages)
                if shaped.token_weights is None
                else shaped.token_weights
            ),
        }


def _conflict_metrics(
    groups: Groups, forward: Spans, backward: Spans, delta_B: Tensor
) -> dict[str, Tensor]:
    tokens = groups.lengths_B.sum().clamp(min=1).to(torch.float64)
    return {
        "conflict_forward": forward.count_B.sum() / tokens,
        "conflict_backward": backward.count_B.sum() / tokens,
        "filtered_completions": (1.0 - delta_B).sum() / max(1, len(delta_B)),
    }
