"""Rules of the critic, the reference policy and the KL penalty: pure functions as in ``rules``."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ext.config.errors import Violation
from openrlhf_ext.config.inputs import ModelFacts

_MAX_CHANGE = 0.2  # of the adaptive controller: the error of the measured KL is clipped to +-20 %


def critic_violations(
    *,
    num_nodes: int,
    gpus_per_node: int,
    tp: int,
    pp: int,
    cp: int,
    vp: int,
    sequence_parallel: bool,
    freezing_steps: int,
) -> Iterator[Violation]:
    """The critic's ranks can be divided into copies of it; degrees are those of the policy where not set."""
    world, copy = num_nodes * gpus_per_node, tp * pp * cp
    if world % copy:
        yield Violation(
            ("critic.num_nodes", "critic.num_gpus_per_node"),
            f"critic.num_nodes * critic.num_gpus_per_node must be a multiple of the critic's tensor * pipeline * "
            f"context parallelism: {num_nodes} * {gpus_per_node} = {world}, {tp} * {pp} * {cp} = {copy}; use other "
            f"numbers of ranks, or a layout of its own (critic.megatron.*; unset, it is that of megatron.*)",
        )
    if sequence_parallel and tp == 1:
        yield Violation(
            ("critic.megatron.sequence_parallel_enable", "critic.megatron.tensor_parallel_size"),
            "critic.megatron.sequence_parallel_enable needs tensor parallelism of the critic: got 1; set it to false",
        )
    if vp > 1 and pp == 1:
        yield Violation(
            ("critic.megatron.virtual_pipeline_size", "critic.megatron.pipeline_parallel_size"),
            f"critic.megatron.virtual_pipeline_size needs more than one pipeline stage of the critic: got {vp}; set it "
            f"to 1",
        )
    if freezing_steps < -1:
        yield Violation(
            ("critic.freezing_steps",),
            f"critic.freezing_steps must be -1 (the policy is always trained) or a step: got {freezing_steps}",
        )


def critic_model_violations(
    *, model: ModelFacts, policy: ModelFacts | None, tp: int, pp: int, vp: int, max_len: int
) -> Iterator[Violation]:
    """The critic's model can be cut as its layout says and reads the policy's tokens.

    Args:
        policy: facts of the policy's model, the same object where the critic starts from it; None if not known yet.
    """
    path = "critic.model_name_or_path (null: actor.model_name_or_path)"
    options = ("critic.model_name_or_path",)
    for size, count, degree, what in (
        (tp, model.num_heads, "tensor", "attention heads"),
        (tp, model.ffn_hidden_size, "tensor", "MLP width"),
        (pp * vp, model.num_layers, "pipeline", "layers"),
    ):
        if count % size:
            chunks = " times virtual_pipeline_size" if degree == "pipeline" and vp > 1 else ""
            yield Violation(
                (*options, f"critic.megatron.{degree}_parallel_size"),
                f"critic.megatron.{degree}_parallel_size{chunks} (unset: that of megatron.*) must divide the {what} of "
                f"the critic's model: got {size}, the model of {path} has {count}",
            )
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield Violation(
            (*options, "critic.megatron.tensor_parallel_size"),
            f"critic.megatron.tensor_parallel_size (unset: that of megatron.*) must divide the key-value heads of the "
            f"critic's model or be a multiple of them: got {tp}, the model of {path} has {model.num_kv_heads}",
        )
    if policy is not None and model.vocab_size < policy.vocab_size:
        yield Violation(
            options,
            f"{path} must know the tokens of the policy: its vocabulary has {model.vocab_size}, the policy's "
            f"{policy.vocab_size}; use a critic of the same family",
        )
    if model.max_positions is not None and max_len > model.max_positions:
        yield Violation(
            (*options, "data.max_len"),
            f"data.max_len must not exceed max_position_embeddings of {path}: got {max_len} > {model.max_positions} "
            f"tokens; lower data.max_len",
        )


def kl_violations(
    *, init_coef: float, target: float | None, horizon: int, samples: int, use_loss: bool, unbiased_gradient: bool
) -> Iterator[Violation]:
    """The adaptive controller has a penalty to control and cannot turn its sign; only a loss has a gradient."""
    if init_coef > 0 and unbiased_gradient and not use_loss:
        yield Violation(
            ("algo.kl.unbiased_gradient", "algo.kl.use_loss"),
            "algo.kl.unbiased_gradient needs algo.kl.use_loss: a penalty in the reward has no gradient of its own; add "
            "algo.kl.use_loss or leave it out",
        )
    if target is None:
        return
    if init_coef == 0:
        yield Violation(
            ("algo.kl.target", "algo.kl.init_coef"),
            f"algo.kl.target needs algo.kl.init_coef > 0, which the controller multiplies: got target {target:g} and "
            f"coefficient 0; set the coefficient or leave the target out",
        )
    if _MAX_CHANGE * samples >= horizon:
        yield Violation(
            ("algo.kl.horizon", "rollout.batch_size", "rollout.n_samples_per_prompt"),
            f"algo.kl.horizon must be above {_MAX_CHANGE:g} * the samples of a batch of rollouts, or one batch could "
            f"turn the sign of the coefficient: got {horizon} samples and {samples}; raise it (10000 is usual)",
        )


def reference_violations(
    *, colocated: bool, own_ranks: int | None, policy_ranks: int, copy: int, offload: bool
) -> Iterator[Violation]:
    """A reference policy is either a copy in the policy's host memory or a group of ranks of its own.

    Args:
        own_ranks: ref.num_nodes * ref.num_gpus_per_node if one of them is set.
        copy: ranks of one copy of the policy, whose layout the reference has.
    """
    options = ("ref.num_nodes", "ref.num_gpus_per_node")
    if own_ranks is None:
        return
    if colocated:
        if own_ranks != policy_ranks:
            yield Violation(
                (*options, "train.colocate_actor_ref", "train.colocate_all"),
                f"a reference policy colocated with the policy has its ranks: ref.num_nodes * ref.num_gpus_per_node = "
                f"{own_ranks}, actor.num_nodes * actor.num_gpus_per_node = {policy_ranks}; make them equal or leave "
                f"ref.num_nodes and ref.num_gpus_per_node out",
            )
        return
    if own_ranks % copy:
        yield Violation(
            options,
            f"ref.num_nodes * ref.num_gpus_per_node must be a multiple of the ranks of one copy of the policy: got "
            f"{own_ranks} and {copy}; use another number, or leave both out for a copy in the policy's host memory",
        )
    if offload:
        yield Violation(
            ("ref.offload", *options),
            f"ref.offload keeps the reference in the policy's host memory, ref.num_nodes * ref.num_gpus_per_node = "
            f"{own_ranks} gives it ranks of its own: leave one of them out, or set train.colocate_actor_ref",
        )
