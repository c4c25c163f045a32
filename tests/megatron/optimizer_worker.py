"""What the ranks of the gradient-norm test run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step import NonFiniteUpdateError
from openrlhf_ext.options.sections import Actor, Adam, Megatron
from tests.megatron.parity import WeightedLogprob
from tests.patience import PATIENCE_S
from tests.sequences import masked_batch


def rows(replica: int, replicas: int):
    """This replica's part of four sequences, and a weight for every response token."""
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(2, 60, (length,), generator=generator) for length in (9, 5, 12, 7)]
    batch = masked_batch(sequences, [torch.ones(len(s) - 1, dtype=torch.long) for s in sequences])
    weights_N = torch.randn(batch.responses.tokens, generator=generator)
    mine = list(range(replica, 4, replicas))
    return batch.select(mine), WeightedLogprob(weights_N, batch.responses).select(mine)


class WithoutANumber(WeightedLogprob):
    """Its gradient is finite; its loss is not, as from an infinite advantage of a token that the
    clip excludes."""

    def select(self, rows) -> WithoutANumber:
        return WithoutANumber(**vars(super().select(rows)))

    def to(self, device) -> WithoutANumber:
        return self

    def loss(self, logprobs_N, shaped):
        loss = super().loss(logprobs_N, shaped)
        loss.value = loss.value.detach() * math.nan
        return loss


def refused(policy: MegatronPolicy, step: Callable[[], object]) -> str:
    """What a step that must not be made says, and whether it changed anything."""
    parameters = [p for model in policy.models for p in model.parameters()]
    before = [p.detach().clone() for p in parameters]
    try:
        step()
    except NonFiniteUpdateError as error:
        same = all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
        return f"{'nothing' if same else 'something'} moved: {error}"
    return "no error"


def with_a_bad_gradient(policy: MegatronPolicy, batch, shaped, bad: float) -> str:
    """A step whose gradient is bad on rank 0 alone."""
    policy.accumulate_gradients(batch, shaped, shaped)
    if dist.get_rank() == 0:
        policy.models[0].buffers[0].grad_data[0] = bad
    return refused(policy, policy.optimizer_step)


MAX_NORM = 0.1

# read values of the host, or are not called on a GPU with TransformerEngine: the head looks on a
# CPU only
NOT_THE_DEVICES = {
    "check_call",
    "check_finite_hidden",
    "check_finite_statistics",
    "_expect_scale",
    "_times",
    "_get_value",
    "local_multi_tensor_l2_norm",
}


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """The functions that read something back from the device in the body."""
    reads: list[str] = []

    def counted(read: Callable) -> Callable:
        def call(tensor: torch.Tensor, *args, **kwargs):
            reads.append(sys._getframe(1).f_code.co_name)
            return read(tensor, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("item", "cpu", "__int__", "__float__", "__bool__", "__index__"):
            stack.enter_context(
                patch.object(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
            )
        yield reads
    reads[:] = sorted(name for name in reads if name not in NOT_THE_DEVICES)


def run_cases(cases: list[dict], ranks: int) -> list[dict]:
    """For each case the norms by group, the global norm of the step, and on rank 0 the gradients if
    they are whole."""
    results = []
    for case in cases:
        megatron = Megatron(param_dtype="fp32", distributed_optimizer_enable=case["distributed"])
        optimizer = Actor(adam=Adam(lr=1e-3), lr_scheduler="constant", max_norm=MAX_NORM)
        layout = ParallelLayout(ranks, **case["layout"])
        initialize_distributed(layout, PATIENCE_S, 1234)
        policy = MegatronPolicy(ModelSettings(case["model"], layout, megatron, optimizer=optimizer))
        batch, shaped = rows(
            parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        )
        metrics = policy.accumulate_gradients(batch, shaped, shaped)
        result = {
            "groups": {
                name: norm for name, norm in metrics.items() if name.startswith("grad_norm/")
            }
        }
        if not case["distributed"]:
            result["grads"] = {
                name: float(g.norm()) for name, g in policy.export(lambda p: p.main_grad)
            }
        step = policy.optimizer_step()
        result["square"] = policy.gradient_square()
        again = policy.train_step(batch, shaped, shaped)
        with counted_reads() as reads:
            policy.train_step(batch, shaped, shaped)
        result |= {"grad_norm": step["grad_norm"], "step": again, "reads": reads}
        assert math.isfinite(again["grad_norm"])
        result["moved"] = [
            with_a_bad_gradient(policy, batch, shaped, bad) for bad in (math.nan, math.inf)
        ]
        no_number = WithoutANumber(**vars(shaped))
        result["moved"].append(
            refused(policy, partial(policy.train_step, batch, no_number, no_number))
        )
        results.append(result)
        parallel_state.destroy_model_parallel()
    return results
