"""`grpo_s`: rewards per completion, shaped by mean entropy.

H. Tan and J. Pan, "GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy",
arXiv 2508.04349. T1 is the first version of the paper, T6 version v6.

Shape suffixes: B = completions, N = tokens of all completions, n = tokens of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from openrlhf_ext.algorithms import Inputs, SequenceAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.entropy_shaping import (
    Classes,
    PreparedEntropy,
    base_rewards,
    class_pools,
    no_share_error,
)
from openrlhf_ext.algorithms.groups import Moments, segment_sum
from openrlhf_ext.algorithms.length_penalty import length_penalty
from openrlhf_ext.algorithms.losses import divide_by_std
from openrlhf_ext.algorithms.option_blocks import (
    Ddof,
    Degenerate,
    EntropyShapingOptions,
    clip_high,
    degenerate,
)
from openrlhf_ext.algorithms.segments import Segments
from openrlhf_ext.options import Float, Violation, no_effect


class GrpoSOptions(EntropyShapingOptions):
    version: Literal["v1", "v2", "v6"] = option("v6", "formula of the shaped reward")
    beta: Float = option(0.1, "v1, v2: entropy weight", ge=0)
    beta1: Float | None = option(None, "base weight; required for v6", recommended=1.0, ge=0)
    beta2: Float | None = option(None, "entropy weight; required for v6", recommended=0.1, ge=0)
    h_hat: Literal["arithmetic", "geometric"] = option(
        "arithmetic", "mean of a completion's token entropies"
    )
    w_hat: Literal["arithmetic", "geometric"] = option(
        "arithmetic", "sequence ratio: mean of token ratios"
    )
    ddof_seq: Ddof = option(1, "std over sequences: 1 sample, 0 population")
    degenerate: Degenerate = degenerate("drop")
    clip_high: Float | None = clip_high(0.28)

    @property
    def two_tables(self) -> bool:
        """Failures have their own shaped rewards."""
        return self.version in ("v2", "v6")

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.version == "v6":
            yield from self.missing(("beta1", "beta2"), self.version)
            if self.beta1 == self.beta2 == 0:
                message = (
                    "beta1 = beta2 = 0 makes all shaped rewards 0; raise one of them "
                    "(published: 1.0, 0.1)"
                )
                yield Violation(("beta1", "beta2"), message)

    def cautions(self) -> Iterator[str]:
        yield from super().cautions()
        if self.beta != type(self).model_fields["beta"].default and self.version == "v6":
            yield no_effect("beta", self.beta, "version v6 does not read it", "use beta1 and beta2")
        for name in ("beta1", "beta2"):
            if (given := getattr(self, name)) is not None and self.version != "v6":
                yield no_effect(name, given, f"version {self.version} does not read it", "use beta")


@register_algorithm("grpo_s", GrpoSOptions)
class GrpoS(SequenceAlgorithm):
    """GRPO-S (Tan et al.): correct completions earn more if their mean entropy is high among the
    correct ones, wrong ones lose more if theirs is low among the wrong ones.

    Per prompt, P are the successes and N the failures.

        Hhat_i = mean_t H'_it                                       H' = clamp(H) + eps
        share+_i = Hhat_i / (sum of Hhat_k over k in P) |P|         share on P, T1 eq. 5
        share-_i = (1/Hhat_i) / (sum of 1/Hhat_k over k in N) |N|   share on N, T1 eq. 17
        R+_i = beta1 r_i + beta2 share+_i                           reward, 0 on N, T6 eq. 9 (v6)
        R-_i = -beta1 - beta2 share-_i                              reward, 0 on P, T6 eq. 9 (v6)
        A_i = (R_i - mean R)/(std R + adv_eps)                      advantage, T1 eq. 8, 19
        s_i = mean_t w_it                                           ratio, T1 eq. 6, T6 eq. 11
        J = mean over prompts and completions of f(s_i, A_i)        objective, T1 eq. 7, 18

    R is R+ on P and R- on N. The rewards of v1 (T1 eq. 5) and v2 (T1 eq. 5, 17) are in `rewards`.
    """

    needs = ("entropies",)

    @property
    def ratio_kind(self) -> str:
        return self.options.w_hat

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        """Compute share, reward, pools and advantage."""
        options, groups = self.options, inputs.groups
        classes = Classes.of(inputs.part, options.two_tables)
        prepared = PreparedEntropy.of(options)
        h_hat_B = sequence_entropies(
            inputs.batch["entropies"], inputs.segments, prepared, options.h_hat
        )
        share_B = self.shares(inputs, h_hat_B, classes, prepared.denominator_eps)
        penalty_B = length_penalty(inputs, options)
        reward_B = self.rewards(inputs, share_B, classes, penalty_B)
        moments = Moments.of_values(reward_B)
        mean_B, std_B = class_pools(
            moments,
            groups.index_B,
            len(groups),
            classes,
            options,
            options.ddof_seq,
            options.two_tables,
        )
        live_B = classes.live_B
        if options.version == "v1" and options.adv_pool == "own":
            live_B = live_B & self._pool_has_success(inputs, classes.success_B)
        centered_B = torch.where(live_B, reward_B - mean_B, 0.0)
        advantages_B = divide_by_std(
            centered_B, std_B, options.adv_eps, live_B, inputs.batch.group_ids
        )
        exposed = {
            "H_hat": h_hat_B,
            "share": share_B,
            "Rpos": torch.where(classes.inverted_B, 0.0, reward_B),
            "Rneg": torch.where(classes.inverted_B, reward_B, 0.0),
            "pool_mean": mean_B,
            "pool_std": std_B,
        }
        return {
            "seq_advantages": advantages_B,
            "rewards": inputs.batch.rewards + penalty_B,
            "exposed": exposed,
        }

    def shares(
        self, inputs: Inputs, h_hat_B: Tensor, classes: Classes, denominator_eps: float
    ) -> Tensor:
        """(B,) share of Hhat among successes, of 1/Hhat among failures, 0 elsewhere."""
        options, member_B = self.options, classes.member_B
        geometric = options.normaliser == "geomean"
        x_B = torch.where(classes.inverted_B, 1.0 / (h_hat_B + denominator_eps), h_hat_B)
        illegal_B = member_B & (~torch.isfinite(x_B) | ((x_B <= 0) & geometric))
        if bool(illegal_B.any()):
            row = int(illegal_B.nonzero()[0])
            raise no_share_error(f"mean entropy {float(h_hat_B[row])} of row {row}", options)
        set_B = classes.inverted_B.long()
        if options.entropy_scope == "group":
            set_B = 2 * inputs.groups.index_B + set_B

        def total(values_B: Tensor) -> Tensor:
            sums = segment_sum(
                torch.where(member_B, values_B, 0.0), set_B, 2 * max(1, len(inputs.groups))
            )
            return sums[set_B]

        count_B = total(torch.ones_like(x_B))
        if geometric:
            center_B = (total(torch.where(member_B, x_B, 1.0).log()) / count_B.clamp(min=1.0)).exp()
            return torch.where(member_B, x_B / center_B, 0.0)
        total_B = total(x_B) + denominator_eps
        return torch.where(member_B & (total_B > 0), x_B / total_B * count_B, 0.0)

    def rewards(
        self, inputs: Inputs, share_B: Tensor, classes: Classes, penalty_B: Tensor
    ) -> Tensor:
        """(B,) the version's R+ on successes and R- on failures, with the length penalty."""
        options = self.options
        r_B = base_rewards(inputs, options.base_reward, classes.success_B)
        if options.version == "v6":
            positive_B = options.beta1 * r_B + options.beta2 * share_B
            negative_B = -options.beta1 - options.beta2 * share_B
        else:
            positive_B = r_B + options.beta * share_B
            negative_B = -share_B if options.version == "v2" else torch.zeros_like(share_B)
        return classes.select(positive_B + penalty_B, negative_B + penalty_B)

    def _pool_has_success(self, inputs: Inputs, success_B: Tensor) -> Tensor:
        """(B,) True if the pool that standardizes the completion contains a success."""
        if self.options.norm_scope == "batch":
            return success_B.any().expand_as(success_B)
        return inputs.groups.any(success_B)[inputs.groups.index_B]


def sequence_entropies(
    entropies_N: Tensor, segments: Segments, prepared: PreparedEntropy, kind: str
) -> Tensor:
    """(B,) float64 mean of each completion's H', arithmetic or geometric (0 if any H' is not
    positive)."""
    mean_B = torch.zeros_like(segments.lengths_B, dtype=torch.float64)
    for block in segments.blocks():
        h_n = prepared.prepare(entropies_N[block.tokens])
        if kind == "geometric":
            # log(0) is -inf and its exponential 0, as specified. A negative entropy counts as 0
            # too.
            h_n = h_n.clamp_(min=0.0).log_()
        mean_B[block.rows] = block.sums(h_n) / block.lengths_b
    return mean_B.exp() if kind == "geometric" else mean_B
