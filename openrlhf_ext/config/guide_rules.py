"""Rules of the guide, a frozen policy that samples a part of every group: pure functions as in ``rules``."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ext.config.errors import Violation
from openrlhf_ext.config.inputs import ModelFacts

MODEL = "guide.model_name_or_path"
_RANKS = ("guide.num_nodes", "guide.num_gpus_per_node")


def zero_batch_violations(*, zero_batch: bool, has_guide: bool) -> Iterator[Violation]:
    """The loss over groups without a success is guided by somebody."""
    if zero_batch and not has_guide:
        yield Violation(
            ("algo.mixed_policy_dapo", MODEL),
            f"algo.mixed_policy_dapo.zero_batch needs log-probs of a guiding policy: got true and no {MODEL}; set "
            f"{MODEL}, or switch zero_batch off",
        )


def sampling_violations(*, samples: int, group: int, colocate_all: bool) -> Iterator[Violation]:
    """The policy samples a part of every group too, and the guide's engines have GPUs of their own.

    Args:
        samples: completions of a group that are the guide's.
        group: all of them.
    """
    if samples >= group:
        yield Violation(
            ("guide.samples_per_prompt", "rollout.n_samples_per_prompt"),
            f"guide.samples_per_prompt must be below rollout.n_samples_per_prompt, the policy samples the other "
            f"completions of a group: got {samples} and {group}; lower the one or raise the other",
        )
    if colocate_all:
        yield Violation(
            (MODEL, "train.colocate_all"),
            f"{MODEL} and train.colocate_all exclude each other, the guide's engines do not share the policy's GPUs: "
            "leave one of them out",
        )


def rank_violations(*, own_ranks: int, copy: int) -> Iterator[Violation]:
    """The guide's own ranks, if any, hold whole copies of it.

    Args:
        own_ranks: guide.num_nodes * guide.num_gpus_per_node if one of them is set, otherwise 0.
        copy: ranks of one copy of the policy, whose layout the guide has.
    """
    if own_ranks % copy:
        yield Violation(
            _RANKS,
            f"guide.num_nodes * guide.num_gpus_per_node must be a multiple of the ranks of one copy of the policy, as "
            f"which the guide is laid out: got {own_ranks} and {copy}; use another number, or leave both out for a "
            "copy in the policy's host memory",
        )


def vocabulary_violations(*, guide: ModelFacts, policy: ModelFacts, difference: str | None) -> Iterator[Violation]:
    """A token id is the same token to guide and policy.

    Args:
        difference: what differs between their tokenizers (``inputs.tokenizer_difference``), None if nothing does.
    """
    options = (MODEL, "actor.model_name_or_path")
    remedy = "use a guide of the policy's family"
    if difference is not None:
        yield Violation(
            options,
            f"{MODEL} must have the tokenizer of actor.model_name_or_path, each reads the other's tokens: {difference};"
            f" {remedy}",
        )
    if guide.vocab_size != policy.vocab_size:
        yield Violation(
            options,
            f"{MODEL} must have as many vocabulary entries (vocab_size in config.json) as actor.model_name_or_path, "
            f"each has to know every token of the other: got {guide.vocab_size} and {policy.vocab_size}; {remedy}, or "
            "resize the embeddings of one of them",
        )
