"""`on_policy_distillation`: the policy samples, a guide says of every token how likely it would
have been.

R. Agarwal et al., "On-Policy Distillation of Language Models", arXiv 2306.13649, with the reverse
KL; as a policy gradient of the sampled tokens: Y. Gu et al., "MiniLLM", arXiv 2306.08543, without
the sum over later tokens.
"""

from __future__ import annotations

from typing import Any

from openrlhf_ext.algorithms import Inputs, RolloutBatch, TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.groups import Groups, Partition
from openrlhf_ext.algorithms.option_blocks import AggregationOptions, ClipOptions, KLOptions
from openrlhf_ext.algorithms.returns import whole_batch
from openrlhf_ext.options import Float


class DistillationOptions(ClipOptions, KLOptions, AggregationOptions):
    most_gap: Float = option(10.0, "bound of a token's advantage, nats", gt=0)


@register_algorithm("on_policy_distillation", DistillationOptions)
class OnPolicyDistillation(TokenAlgorithm):
    """Reverse KL to a guide on the policy's own samples, token by token; rewards are metrics only,
    and one completion per prompt is enough.

        A_it = log pi_guide(o_it) - log pi_old(o_it), within +-most_gap
            both at the rollout temperature
        J = mean over all tokens of f(w_it, A_it)

    In the mean over samples the gradient of J at w = 1 is that of `-KL(pi || pi_guide)` of each
    token's distribution.
    """

    needs = ("guide_logprobs",)
    reads_old = True
    kl_places = ("loss",)

    def partition(self, batch: RolloutBatch, groups: Groups) -> Partition:
        return whole_batch(batch, groups)

    def advantages(self, inputs: Inputs) -> dict[str, Any]:
        batch, most = inputs.batch, self.options.most_gap
        gap_N = batch["guide_logprobs"] - batch["old_logprobs"]
        reverse_kl = -gap_N.double().mean() if len(gap_N) else gap_N.double().sum()
        return {"advantages": gap_N.clamp(-most, most), "metrics": {"reverse_kl": reverse_kl}}
