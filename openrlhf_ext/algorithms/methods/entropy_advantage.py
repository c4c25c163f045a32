"""`entropy_advantage`: uncertain tokens get a bonus on their advantage.

D. Cheng et al., "Reasoning with Exploration: An Entropy Perspective", arXiv 2506.14758.

Shape suffixes: B = completions, N = tokens of all completions, n = tokens of one block.
"""

from __future__ import annotations

from typing import Any

import torch

from openrlhf_ext.algorithms import Inputs, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.losses import GroupRelative
from openrlhf_ext.algorithms.option_blocks import (
    Degenerate,
    TokenGroupOptions,
    clip_high,
    degenerate,
)
from openrlhf_ext.options import Float


class EntropyAdvantageOptions(TokenGroupOptions):
    ent_alpha: Float = option(0.4, "entropy weight (published: 0.4 with GRPO, 0.1 with PPO)", ge=0)
    ent_kappa: Float = option(
        2.0, "the bonus is at most |A| / kappa, so it never turns the sign", ge=1
    )
    degenerate: Degenerate = degenerate("zero")
    clip_high: Float | None = clip_high(0.28)


@register_algorithm("entropy_advantage", EntropyAdvantageOptions)
class EntropyAdvantage(GroupRelative, TokenAlgorithm):
    """Entropy-shaped advantage (Cheng et al., arXiv 2506.14758): uncertain tokens get a bonus that
    never turns the sign of the advantage. The formula is from a secondary description.

        A_it = A_i + min(ent_alpha H_it, |A_i|/ent_kappa)               H without gradient
        J = 1/(sum_i T_i) sum_i sum_t f(w_it, A_it)
    """

    needs = ("entropies",)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        fields = super().advantages(inputs)
        limit_B = (fields["seq_advantages"].abs() / self.options.ent_kappa).to(
            inputs.batch.float_dtype
        )
        live_B = inputs.part.live_B.to(limit_B.dtype)
        for block in inputs.segments.blocks():
            entropies_n = inputs.batch["entropies"][block.tokens]
            bonus_n = torch.minimum(
                self.options.ent_alpha * entropies_n, block.spread(limit_B[block.rows])
            )
            fields["advantages"][block.tokens] += bonus_n * block.spread(live_B[block.rows])
        return fields
