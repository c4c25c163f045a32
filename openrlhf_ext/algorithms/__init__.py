"""Policy-gradient algorithms as pure functions on tensors: rewards and entropies in, advantages and losses out.

    batch = RolloutBatch(tokens=..., mask=..., rewards=..., group_ids=..., old_logprobs=..., entropies=...)
    algorithm = get_algorithm("gtpo_entropy", version="v6", alpha1=1.0, alpha2=0.1)
    shaped = algorithm.shape(batch)                     # whole groups
    loss = algorithm.loss(new_logprobs, shaped)         # loss.value.backward()

This package imports torch and nothing else of the stack.
"""

from openrlhf_ext.algorithms import (  # noqa: F401
    baselines,
    covariance,
    gae,
    grpo_s,
    gtpo_conflict,
    gtpo_entropy,
    mixed_policy,
)
from openrlhf_ext.algorithms.base import Algorithm, Inputs, SequenceAlgorithm, TokenAlgorithm
from openrlhf_ext.algorithms.batch import Loss, RolloutBatch, ShapedBatch
from openrlhf_ext.algorithms.gtpo_conflict import mean_entropies
from openrlhf_ext.algorithms.option_parsing import OptionInfo, option
from openrlhf_ext.algorithms.registry import (
    algorithm_names,
    describe_options,
    get_algorithm,
    register_algorithm,
    with_published_values,
)

__all__ = [
    "Algorithm",
    "Inputs",
    "Loss",
    "OptionInfo",
    "RolloutBatch",
    "SequenceAlgorithm",
    "ShapedBatch",
    "TokenAlgorithm",
    "algorithm_names",
    "describe_options",
    "get_algorithm",
    "mean_entropies",
    "option",
    "register_algorithm",
    "with_published_values",
]
