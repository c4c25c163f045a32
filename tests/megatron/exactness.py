"""Every algorithm on one small mini-batch: the truth from plain transformers in fp64, and what the
ranks compute.

The truth is made in one process, one sequence at a time. The ranks compute the same mini-batch in a
layout, dealt, cut into micro-batches and packed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_ext.algorithms import LossBatch, RolloutBatch, get_algorithm
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch
from openrlhf_ext.sft.loss import Answers, SupervisedLoss
from tests.algorithms.test_invariants import NAMES, build
from tests.megatron.parity import deal, settings
from tests.patience import PATIENCE_S
from tests.sequences import masked_batch, plain_rows

GROUP, TEMPERATURE, SUPERVISED = 4, 0.8, "supervised"
# whose old log-probs are those of the update: one by tokens in the head, with a correction; one of
# whole sequences
OWN = ("dapo with correction", "gspo")
# (prompt, response) tokens of each completion: one-token responses among them
LENGTHS = [
    (4, 9),
    (4, 1),
    (4, 6),
    (4, 3),
    (7, 2),
    (7, 12),
    (7, 1),
    (7, 5),
    (2, 1),
    (2, 4),
    (2, 8),
    (2, 3),
]


@dataclass
class Truth:
    """One algorithm's loss on the mini-batch: ``shaped`` and what the whole of it gives."""

    shaped: LossBatch | Answers
    value: float
    metrics: dict[str, float]
    grads: dict[str, Tensor]  # by HF name
    seen: tuple[Tensor, ...] | None = None  # log-probs and entropies that the update has to tell


def algorithms() -> dict[str, Any]:
    """Every registered algorithm, and the terms that any of them may carry: KL, importance
    correction, dual clip."""
    made = {name: build(name) for name in NAMES}
    # else it drops all completions of a random model
    made["gtpo_conflict"] = build("gtpo_conflict", h_ini=1.0)
    made["gae"] = get_algorithm("gae")
    made["grpo with KL"] = get_algorithm(
        "grpo", kl={"coef": 0.1, "estimator": "k3", "place": "loss"}
    )
    correction = {"level": "token", "mode": "mask", "gating": "ratio", "threshold": [0.5, 2.0]}
    made["dapo with entropy bonus"] = get_algorithm("dapo", entropy_coef=0.3)
    made["gspo with entropy bonus"] = get_algorithm("gspo", entropy_coef=0.3)
    made["dapo with correction"] = get_algorithm("dapo", dual_clip=3.0, correction=correction)
    return made


def make_batch(vocab: int) -> SequenceBatch:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(2, vocab, (p + r,), generator=generator) for p, r in LENGTHS]
    for row, (prompt, _) in enumerate(LENGTHS):  # of a group the same one
        sequences[row][:prompt] = sequences[row // GROUP * GROUP][:prompt]
    masks = [torch.tensor([0] * (p - 1) + [1] * r) for p, r in LENGTHS]
    return masked_batch(sequences, masks)


def rollout(batch: SequenceBatch, new_N: Tensor, entropies_N: Tensor) -> RolloutBatch:
    """A rollout batch whose old log-probs are far enough from the new ones for every kind of
    clipping."""
    generator = torch.Generator().manual_seed(7)

    def near(scale: float) -> Tensor:
        noise_N = scale * torch.randn(new_N.shape, generator=generator)
        return (new_N.detach() + noise_N).clamp(max=-1e-3).float()

    rows = len(batch)
    return RolloutBatch(
        tokens=batch.targets_N,
        lengths=batch.counts_B,
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
        group_ids=torch.arange(rows) // GROUP,
        old_logprobs=near(0.4),
        entropies=entropies_N.detach().float(),
        ref_logprobs=near(0.3),
        guide_logprobs=near(0.3),
        rollout_logprobs=near(0.5),
        values=torch.randn(new_N.shape, generator=generator),
        truncated=torch.arange(rows) == 5,
        from_guide=torch.arange(rows) % GROUP == 3,
        group_size=GROUP,
    )


def truths(model: torch.nn.Module, batch: SequenceBatch) -> dict[str, Truth]:
    """Every algorithm's loss, metrics and gradients by plain transformers, in fp64."""
    model = copy.deepcopy(model).double()
    rows = [
        (model(tokens[None]).logits[0] / TEMPERATURE)[positions]
        for tokens, positions in plain_rows(batch)
    ]
    log_p_NV = torch.cat(rows).log_softmax(-1)
    new_N = log_p_NV.gather(1, batch.targets_N.long()[:, None])[:, 0]
    entropies_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
    samples = rollout(batch, new_N, entropies_N)
    made = {
        name: truth(algorithm, samples, new_N, entropies_N, model)
        for name, algorithm in algorithms().items()
    }
    on_policy = replace(samples, old_logprobs=new_N.detach())
    for name in OWN:
        algorithm = algorithms()[name]
        own = truth(algorithm, on_policy, new_N, entropies_N, model)
        shaped = algorithm.shape(replace(samples, old_logprobs=None, entropies=None)).lean()
        seen = (new_N.detach().float(), entropies_N.detach().float())
        made[f"{name}, of the update"] = replace(own, shaped=shaped, seen=seen)
    return made | {SUPERVISED: supervised_truth(batch, new_N, model)}


def supervised_truth(batch: SequenceBatch, new_N: Tensor, model: torch.nn.Module) -> Truth:
    """Supervised fine-tuning on the same tokens: their mean negative log-prob."""
    loss = -new_N.mean()
    model.zero_grad()
    loss.backward(retain_graph=True)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    return Truth(Answers(batch.responses, batch.responses.tokens), float(loss.detach()), {}, grads)


def truth(
    algorithm: Any,
    samples: RolloutBatch,
    new_N: Tensor,
    entropies_N: Tensor,
    model: torch.nn.Module,
) -> Truth:
    shaped = algorithm.prepare(new_N.detach(), algorithm.shape(samples))
    loss = algorithm.loss(new_N, shaped)
    model.zero_grad()
    bonus = (
        algorithm.entropy_coef * entropies_N[shaped.loss_mask].mean()
        if algorithm.entropy_coef
        else 0.0
    )
    (loss.value - bonus).backward(retain_graph=True)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(grad.norm() > 1e-6 for grad in grads.values()), (
        f"{algorithm.name}: a gradient to compare with is zero"
    )
    metrics = {name: float(value) for name, value in loss.metrics.items() if name != "policy_loss"}
    return Truth(shaped.lean(), float(loss.value.detach()), metrics, grads)


def chosen(case: dict, problem: dict[str, Truth]) -> dict[str, Truth]:
    """The algorithms that a case is about: all, or those it names."""
    return {
        name: truth for name, truth in problem.items() if name in case.get("algorithms", problem)
    }


# ---- what the ranks run


def run_layouts(
    cases: list[dict], world_size: int, batch: SequenceBatch, problems: dict[str, dict]
) -> list[dict]:
    """For each case and algorithm, (metrics, {HF name: relative error of the gradient}) as this
    rank sees them."""
    results = []
    for case in cases:
        policy_settings = settings(case, world_size)
        initialize_distributed(policy_settings.layout, PATIENCE_S, 1234)
        policy = MegatronPolicy(policy_settings)
        mine = deal(case, batch, policy.shape.attention_length)
        results.append(
            {
                name: run_algorithm(policy, batch, mine, truth)
                for name, truth in chosen(case, problems[case["name"]]).items()
            }
        )
        parallel_state.destroy_model_parallel()
    dist.barrier()
    return results


def run_algorithm(
    policy: MegatronPolicy, batch: SequenceBatch, rows: list[int], truth: Truth
) -> tuple[dict, dict]:
    shaped = truth.shaped
    objective = SupervisedLoss() if isinstance(shaped, Answers) else shaped.algorithm
    seen: list[LogprobEntropy] | None = None if truth.seen is None else []
    metrics = policy.accumulate_gradients(batch.select(rows), shaped.select(rows), objective, seen)
    metrics = {name: value for name, value in metrics.items() if not name.startswith("grad_norm/")}
    for found_n, expected_N in zip(seen[0] if seen else (), truth.seen or (), strict=True):
        torch.testing.assert_close(
            found_n, batch.responses.take(expected_N, rows), atol=1e-5, rtol=1e-5
        )
    errors = {}
    for name, grad in policy.export(lambda parameter: parameter.main_grad):
        expected = truth.grads[name]
        errors[name] = float((grad.double() - expected).norm() / expected.norm())
    return metrics, errors
