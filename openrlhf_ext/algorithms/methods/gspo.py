"""`gspo`: C. Zheng et al., "Group Sequence Policy Optimization", arXiv 2507.18071."""

from __future__ import annotations

from openrlhf_ext.algorithms import SequenceAlgorithm, register_algorithm
from openrlhf_ext.algorithms.losses import GroupRelative
from openrlhf_ext.algorithms.option_blocks import (
    ClipOptions,
    Degenerate,
    GroupOptions,
    clip_high,
    clip_low,
    degenerate,
)
from openrlhf_ext.options import Float


class GspoOptions(GroupOptions, ClipOptions):
    degenerate: Degenerate = degenerate("literal")
    clip_low: Float | None = clip_low(3e-4)
    clip_high: Float | None = clip_high(4e-4)


@register_algorithm("gspo", GspoOptions)
class Gspo(GroupRelative, SequenceAlgorithm):
    """GSPO (Zheng et al., arXiv 2507.18071): one ratio per completion, the geometric mean of its
    token ratios, clipped as a whole.

        A_i = (r_i - mean r)/(std r + adv_eps)                          eq. 6
        s_i = exp(1/T_i sum_t (new_it - old_it))                        eq. 7
        J = 1/G sum_i f(s_i, A_i)                                       eq. 5
    """

    kl_places = ("reward",)
