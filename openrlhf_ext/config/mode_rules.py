"""Rules between the options of colocated and streaming training; pure, like ``rules``."""

from __future__ import annotations

from collections.abc import Iterator

from openrlhf_ext.config.errors import Violation


def colocation_violations(
    *,
    colocate_all: bool,
    policy_ranks: int,
    critic_ranks: int,
    num_engines: int,
    engine_tp: int,
    policy_sleep: bool,
    engine_sleep: bool,
) -> Iterator[Violation]:
    """Every shared GPU holds one policy rank and one worker of an engine; only sharers sleep."""
    engine_ranks = num_engines * engine_tp
    if colocate_all and policy_ranks != engine_ranks:
        yield Violation(
            (
                "train.colocate_all",
                "actor.num_nodes",
                "actor.num_gpus_per_node",
                "vllm.num_engines",
                "vllm.tensor_parallel_size",
            ),
            f"train.colocate_all puts one policy rank and one engine worker on every GPU: actor.num_nodes * "
            f"actor.num_gpus_per_node must equal vllm.num_engines * vllm.tensor_parallel_size, got {policy_ranks} and "
            f"{num_engines} * {engine_tp} = {engine_ranks}; change vllm.num_engines or the number of ranks",
        )
    if colocate_all and critic_ranks > policy_ranks:
        yield Violation(
            ("critic.num_gpus_per_node", "critic.num_nodes", "train.colocate_all"),
            f"critic.num_nodes * critic.num_gpus_per_node must not exceed the policy's ranks with train.colocate_all, "
            f"whose GPUs the critic shares: got {critic_ranks} and {policy_ranks}",
        )
    for option, is_on in (("ds.enable_sleep", policy_sleep), ("vllm.enable_sleep", engine_sleep)):
        if is_on and not colocate_all:
            yield Violation(
                (option, "train.colocate_all"),
                f"{option} frees GPU memory for those who share the GPU, and without train.colocate_all nobody does; "
                f"add --train.colocate_all or leave {option} out",
            )


def node_violations(*, num_nodes: int, gpus_per_node: int, tp: int) -> Iterator[Violation]:
    """Tensor-parallel groups, which communicate in every layer, fit into a node."""
    if tp > gpus_per_node and num_nodes > 1:
        yield Violation(
            ("megatron.tensor_parallel_size", "actor.num_gpus_per_node"),
            f"megatron.tensor_parallel_size must not exceed actor.num_gpus_per_node, every layer would wait for the "
            f"network: got {tp} and {gpus_per_node}; use megatron.pipeline_parallel_size between nodes",
        )


def streaming_violations(
    *, asked: int | None, queue: int | None, staleness: int, partial_rollout: bool, async_enable: bool,
    colocate_all: bool, late: str, correction: str, max_requests: int | None, group_size: int,
) -> Iterator[Violation]:  # fmt: skip
    """What may lag can be corrected or is dropped; engines that sample beside training have GPUs of their own.

    Args:
        asked: ``train.max_staleness``; None if it is not set.
        queue: ``train.async_queue_size``; None if it is not set.
        staleness: what both come to.
    """
    if partial_rollout and not async_enable:
        yield Violation(
            ("train.partial_rollout_enable", "train.async_enable"),
            "train.partial_rollout_enable needs train.async_enable: between synchronous steps no rollout is under way; "
            "add --train.async_enable, or leave it out and set --train.max_staleness, which implies it",
        )
    if async_enable and asked is not None and asked != (queue if queue is not None else asked):
        yield Violation(
            ("train.max_staleness", "train.async_queue_size"),
            f"train.max_staleness and train.async_queue_size are two names of one number, got {asked} and {queue}; "
            "leave train.async_queue_size out",
        )
    if async_enable and asked == 0:
        yield Violation(
            ("train.max_staleness", "train.async_enable"),
            "train.async_enable samples while the policy trains, which train.max_staleness 0 forbids: leave one of "
            "them out, or set train.max_staleness to at least 1",
        )
    if staleness > 0 and colocate_all:
        option = "train.async_enable" if asked is None else "train.max_staleness"
        yield Violation(
            (option, "train.colocate_all"),
            f"{option} and train.colocate_all exclude each other: engines that sample while the policy trains need "
            "GPUs of their own; leave one of them out",
        )
    # without partial rollouts nothing is in flight at a sync, so no group can be late
    streams = staleness > 0 and (partial_rollout or not async_enable)
    if streams and late == "train" and correction == "off":
        yield Violation(
            ("train.late_groups", "algo.advantage.is_correction_level"),
            "train.late_groups train needs an importance correction, and algo.advantage.is_correction_level is off: "
            "groups may lag by any number of weight versions; set --train.late_groups drop, or a correction",
        )
    if max_requests is not None and max_requests < group_size:
        yield Violation(
            ("vllm.max_requests", "rollout.n_samples_per_prompt"),
            f"vllm.max_requests must be at least rollout.n_samples_per_prompt, a group is asked for as a whole: got "
            f"{max_requests} and {group_size}; raise it or leave it out",
        )
