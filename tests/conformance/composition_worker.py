"""What the ranks of ``test_parallel_composition`` run: a train step in a layout, as it is or with a
fault, and what each rank sees of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_ext.megatron.built import TrainedChunk
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.model import experts
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step.batch import SequenceBatch
from openrlhf_ext.sft.loss import Answers, SupervisedLoss
from tests.megatron.parity import deal, settings
from tests.patience import PATIENCE_S

MEGATRONS_LOSSES = (
    "megatron.core.models.common.language_module.language_module.LanguageModule.compute_language_model_loss",
    "megatron.core.tensor_parallel.cross_entropy._VocabParallelCrossEntropy.apply",
    "megatron.core.transformer.multi_token_prediction.MTPLossAutoScaler.apply",
    "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler.apply",
)
FOREIGN = (
    "CrossAttention",
    "MultiTokenPrediction",
    "GatedDeltaNet",
    "LLaVA",
    "MegatronFSDP",
    "FullyShardedDataParallel",
)
# a group's name -> the coordinates (``layout.place``) in which its ranks differ, among those that
# divide the same ranks
_DENSE, _EXPERTS = (
    ("tensor", "context", "stage", "replica"),
    ("expert_tensor", "expert", "stage", "expert_replica"),
)
GROUPS = {
    "tp": (_DENSE, ("tensor",)), "cp": (_DENSE, ("context",)), "pp": (_DENSE, ("stage",)), "dp": (_DENSE, ("replica",)),
    "tp_cp": (_DENSE, ("tensor", "context")), "dp_cp": (_DENSE, ("context", "replica")),
    "ep": (_EXPERTS, ("expert",)), "expt_tp": (_EXPERTS, ("expert_tensor",)),
    "tp_ep": (_EXPERTS, ("expert_tensor", "expert")), "expt_dp": (_EXPERTS, ("expert_replica",)),
}  # fmt: skip


def run(cases: list[dict], batches: dict[str, SequenceBatch]) -> list[dict]:
    results = []
    for case in cases:
        policy_settings = settings(
            case, dist.get_world_size() if dist.is_initialized() else case["world_size"]
        )
        initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
        results.append(run_case(MegatronPolicy(policy_settings), case, batches[case["batch"]]))
        parallel_state.destroy_model_parallel()
    return results


def run_case(policy: MegatronPolicy, case: dict, batch: SequenceBatch) -> dict:
    rows = deal(case, batch, policy.shape.attention_length)
    shaped = Answers(batch.responses, batch.responses.tokens).select(rows)
    with contextlib.ExitStack() as stack:
        losses = {name: stack.enter_context(mock.patch(name)) for name in MEGATRONS_LOSSES}
        masks, padded = stack.enter_context(routers_watched())
        if "fault" in case:
            stack.enter_context(FAULTS[case["fault"]](policy))
        groups = wrong_groups(policy)
        metrics = policy.accumulate_gradients(batch.select(rows), shaped, SupervisedLoss())
        copies, shards = compared_over_tensor_ranks(policy)
        grads = {name: grad.clone() for name, grad in policy.export(main_grad)}
        norm = policy.optimizer_step()["grad_norm"]
    return {
        "metrics": metrics,
        "grads": grads,
        "grad_norm": norm,
        "copies": copies,
        "shards": shards,
        "groups": groups,
        "unused": unused_in(policy)
        + [name for name, loss in losses.items() if loss.called]
        + masks,
        "padded": any(padded),
    }


def main_grad(parameter: torch.nn.Parameter) -> Tensor:
    return parameter.main_grad  # type: ignore[attr-defined]  # DDP's


def compared_over_tensor_ranks(policy: MegatronPolicy) -> tuple[dict[str, float], dict[str, float]]:
    """How far the tensor-parallel ranks' gradients of a parameter are from each other, relative to
    their size: of parameters that Megatron takes for copies, and of those that it takes for
    shards."""
    group = parallel_state.get_tensor_model_parallel_group()
    copies: dict[str, float] = {}
    shards: dict[str, float] = {}
    for chunk in policy.chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:  # cut over other groups, and always marked as cut
                continue
            grad = main_grad(parameter).contiguous()
            every = [torch.empty_like(grad) for _ in range(group.size())]
            dist.all_gather(every, grad, group=group)
            apart = max(
                float((other - every[0]).norm() / every[0].norm().clamp_min(1e-12))
                for other in every
            )
            found = shards if getattr(parameter, "tensor_model_parallel", False) else copies
            found[name] = apart
    return copies, shards


def wrong_groups(policy: MegatronPolicy) -> list[str]:
    """Process groups held by modules that are not those of their name in the layout."""
    layout, rank, wrong = policy.settings.layout, dist.get_rank(), []
    places = [layout.place(other) for other in range(layout.world_size)]

    def ranks(name: str) -> list[int]:
        coordinates, differing = GROUPS[name]
        fixed = [[getattr(place, c) for c in coordinates if c not in differing] for place in places]
        return [other for other, place in enumerate(fixed) if place == fixed[rank]]

    for chunk in policy.models:
        for path, module in chunk.named_modules():
            for name, group in held_groups(module):
                name = f"expt_{name}" if name == "tp" and path.endswith(".experts") else name
                if name in GROUPS and dist.get_process_group_ranks(group) != ranks(name):
                    wrong.append(
                        f"{path}: {name} is {dist.get_process_group_ranks(group)}, not "
                        f"{ranks(name)}"
                    )
    return wrong


def held_groups(module: torch.nn.Module) -> Iterator[tuple[str, dist.ProcessGroup]]:
    for attribute, value in vars(module).items():
        if isinstance(value, dist.ProcessGroup):
            yield attribute.removesuffix("_group").removeprefix("attn_"), value
        elif type(value).__name__ == "ProcessGroupCollection":
            for name, group in vars(value).items():
                if isinstance(group, dist.ProcessGroup):
                    yield name, group


def unused_in(policy: MegatronPolicy) -> list[str]:
    """What our models have of the parts and switches of Megatron that the findings need: nothing,
    as it should be."""
    config, found = policy.config, []
    for chunk in policy.models:
        kinds = {type(module).__name__ for module in chunk.modules()}
        found += [kind for kind in kinds if kind.startswith(FOREIGN)]
        found += [
            name
            for name, _ in chunk.named_parameters()
            if "softmax_offset" in name or "mtp" in name
        ]
        assert isinstance(chunk, TrainedChunk)
        found += ["Megatron-FSDP"] * bool(chunk.ddp_config.use_megatron_fsdp)
    expected = {
        "calculate_per_token_loss": True,
        "mtp_num_layers": None,
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "distribute_saved_activations": False,
        "window_size": None,
    }
    return found + [name for name, value in expected.items() if getattr(config, name) != value]


@contextlib.contextmanager
def routers_watched() -> Iterator[tuple[list[str], list[bool]]]:
    """Collects padding masks that routers are called with, and whether a pack has tokens of no
    sequence."""
    masks: list[str] = []
    padded: list[bool] = []
    plain = experts.Router.routing

    def routing(self: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        masks.extend(["padding mask"] * (padding_mask is not None))
        if self.told is not None:
            padded.append(len(self.told.seen_H.unique()) < logits.flatten(0, -2).shape[0])
        return plain(self, logits, padding_mask)

    with mock.patch.object(experts.Router, "routing", routing):
        yield masks, padded


# ---- faults, each as a finding has it


@contextlib.contextmanager
def shards_of_other_ranks(policy: MegatronPolicy) -> Iterator[None]:
    """1, 2: a loss whose ranks do not hold the shards of one vocabulary, which it takes them for.
    (The whole vocabulary on every rank the head refuses, or finds the same loss: rows behind the
    last token count as padding.)"""
    plain = policy._head_arguments
    wrong = {"process_group": parallel_state.get_data_parallel_group()}
    with mock.patch.object(policy, "_head_arguments", lambda *args: plain(*args) | wrong):
        yield


@contextlib.contextmanager
def mean_of_local_means(policy: MegatronPolicy) -> Iterator[None]:
    """3, 9: every rank divides by the tokens that it has itself."""
    plain = policy._loss
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def local(part: Any, states: Tensor, shaped: Answers, algorithm: Any) -> Any:
        return plain(
            part,
            states,
            dataclasses.replace(shaped, tokens=ranks * max(1, len(part.targets_N))),
            algorithm,
        )

    with mock.patch.object(policy, "_loss", local):
        yield


@contextlib.contextmanager
def rows_of_another_replica(policy: MegatronPolicy) -> Iterator[None]:
    """4 to 7: activations are put together with those of ranks that compute other sequences."""
    (layer, *_) = policy.chunks[0].decoder.layers
    with mock.patch.object(
        layer.mlp.linear_fc2, "tp_group", parallel_state.get_data_parallel_group()
    ):
        yield


@contextlib.contextmanager
def shard_not_marked(policy: MegatronPolicy) -> Iterator[None]:
    """8: the norm counts a parameter that is cut by heads on the first rank only."""
    for layer in policy.chunks[0].decoder.layers:
        layer.self_attention.linear_qkv.bias.tensor_model_parallel = False
    yield


@contextlib.contextmanager
def copy_marked(policy: MegatronPolicy) -> Iterator[None]:
    """8, the other way: the norm counts copies once for each rank."""
    policy.chunks[0].decoder.final_layernorm.weight.tensor_model_parallel = True
    yield


@contextlib.contextmanager
def balance_of_all_ranks(policy: MegatronPolicy) -> Iterator[None]:
    """10: every rank takes the counts of all ranks for its own."""
    plain = experts.balance_loss

    def twice(
        logits: Tensor, chosen: Tensor, told: Any, topk: int, group: dist.ProcessGroup
    ) -> Tensor:
        return plain(logits, chosen, told, topk, group) * group.size()

    with mock.patch.object(experts, "balance_loss", twice):
        yield


@contextlib.contextmanager
def copies_not_summed(policy: MegatronPolicy) -> Iterator[None]:
    """11: a norm of heads whose gradients are of a rank's own heads."""
    with mock.patch.object(policy.config, "qk_layernorm", False):
        yield


@contextlib.contextmanager
def norms_not_summed(policy: MegatronPolicy) -> Iterator[None]:
    """11, with sequence parallelism: a norm whose gradients are of a rank's own tokens."""
    for layer in policy.chunks[0].decoder.layers:
        layer.self_attention.linear_qkv.layer_norm_weight.sequence_parallel = False
    yield


@contextlib.contextmanager
def attention_over_other_ranks(policy: MegatronPolicy) -> Iterator[None]:
    """13: attention of ranks that hold other heads of the same tokens."""
    (layer, *_) = policy.chunks[0].decoder.layers
    wrong = parallel_state.get_tensor_model_parallel_group()
    with mock.patch.object(layer.self_attention.core_attention, "cp_group", wrong):
        yield


FAULTS: dict[str, Callable[[MegatronPolicy], Any]] = {
    fault.__name__: fault
    for fault in (
        shards_of_other_ranks,
        mean_of_local_means,
        rows_of_another_replica,
        shard_not_marked,
        copy_marked,
        balance_of_all_ranks,
        copies_not_summed,
        norms_not_summed,
        attention_over_other_ranks,
    )
}
