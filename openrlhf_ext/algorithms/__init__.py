"""Policy-gradient algorithms as pure functions on tensors: rewards and entropies in, advantages and
losses out.

    batch = RolloutBatch(tokens=..., lengths=..., rewards=..., group_ids=..., old_logprobs=...,
    entropies=...) algorithm = get_algorithm("gtpo_entropy", version="v6", alpha1=1.0, alpha2=0.1)
    shaped = algorithm.shape(batch)                     # whole groups
    loss = algorithm.loss(new_logprobs, shaped)         # loss.value.backward()

This package imports torch and pydantic, nothing else of the stack. To read it: `methods/` has a
file for each method with its options, formulas and advantages, `losses` the losses of all of them;
`group_advantage`, `returns`, `entropy_shaping`, `covariance`, `conflict_mask` and `length_penalty`
what methods share; `batch`, `groups` and `base` the frame: what goes in, who belongs together, what
comes out.
"""

from openrlhf_ext.algorithms.base import Algorithm, Loss, LossBatch
from openrlhf_ext.algorithms.batch import RolloutBatch
from openrlhf_ext.algorithms.groups import Inputs
from openrlhf_ext.algorithms.losses import SequenceAlgorithm, TokenAlgorithm
from openrlhf_ext.algorithms.metrics import mean_entropies
from openrlhf_ext.algorithms.registry import (
    algorithm_names,
    describe_options,
    get_algorithm,
    register_algorithm,
    with_published_values,
)
from openrlhf_ext.options import option

__all__ = [
    "Algorithm",
    "Inputs",
    "Loss",
    "RolloutBatch",
    "SequenceAlgorithm",
    "LossBatch",
    "TokenAlgorithm",
    "algorithm_names",
    "describe_options",
    "get_algorithm",
    "mean_entropies",
    "option",
    "register_algorithm",
    "with_published_values",
]

# last: a method may import from here, as the file of a user does
from openrlhf_ext.algorithms import methods  # noqa: E402, F401
