"""Rules between the options of colocated and asynchronous training; pure, like ``rules``."""

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


def async_violations(*, async_enable: bool, partial_rollout: bool, colocate_all: bool) -> Iterator[Violation]:
    """Engines that sample while the policy trains have GPUs of their own."""
    if partial_rollout and not async_enable:
        yield Violation(
            ("train.partial_rollout_enable", "train.async_enable"),
            "train.partial_rollout_enable needs train.async_enable: between synchronous steps no rollout is under way",
        )
    if async_enable and colocate_all:
        yield Violation(
            ("train.async_enable", "train.colocate_all"),
            "train.async_enable and train.colocate_all exclude each other: engines that sample while the policy trains "
            "need GPUs of their own; leave one of them out",
        )
