"""From hidden states to log-probability and entropy, on vocabulary shards, in bounded memory."""

from openrlhf_ext.head.linear import HeadOutput, linear_logprob_entropy

__all__ = ["HeadOutput", "linear_logprob_entropy"]
