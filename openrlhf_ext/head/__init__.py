"""From hidden states to log-probability, entropy and token losses, on vocabulary shards, in bounded
memory."""

from openrlhf_ext.head.linear import (
    HeadOutput,
    NonFiniteLogitsError,
    TokenLossOutput,
    linear_logprob_entropy,
    linear_token_loss,
)
from openrlhf_ext.head.passes import TokenLoss, WholeRows

__all__ = [
    "HeadOutput",
    "NonFiniteLogitsError",
    "TokenLoss",
    "TokenLossOutput",
    "WholeRows",
    "linear_logprob_entropy",
    "linear_token_loss",
]
