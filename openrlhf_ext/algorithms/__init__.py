"""Policy-gradient algorithms as pure functions on tensors: rewards and entropies in, advantages and losses out.

    batch = RolloutBatch(tokens=..., mask=..., rewards=..., group_ids=..., old_logprobs=..., entropies=...)
    algorithm = get_algorithm("gtpo_entropy", version="v6", alpha1=1.0, alpha2=0.1)
    shaped = algorithm.shape(batch)                     # whole groups
    loss = algorithm.loss(new_logprobs, shaped)         # loss.value.backward()

This package imports torch and nothing else of the stack.
"""

from openrlhf_ext.algorithms import baselines, conflict_mask, entropy_shaping, gae, mixed_policy  # noqa: F401
from openrlhf_ext.algorithms.base import Algorithm, Inputs, SequenceAlgorithm, TokenAlgorithm
from openrlhf_ext.algorithms.batch import Loss, RolloutBatch, ShapedBatch
from openrlhf_ext.algorithms.conflict_mask import mean_entropies
from openrlhf_ext.algorithms.options import OptionInfo, option
from openrlhf_ext.algorithms.registry import algorithm_names, describe_options, get_algorithm, register_algorithm

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
]
