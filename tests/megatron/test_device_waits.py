"""The host queues the micro-batches of a step without waiting for the device: nothing is read back
from it.

The meta device stands in for a GPU: its tensors have no values, so that reading one is an error.
"""

from __future__ import annotations

import pytest
import torch

from openrlhf_ext.megatron import built, critic, policy
from openrlhf_ext.megatron.critic import MegatronCritic, ValueTargets
from openrlhf_ext.megatron.distributed import fake_rank
from openrlhf_ext.megatron.layout import ParallelLayout
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings
from openrlhf_ext.megatron.step import schedule
from openrlhf_ext.megatron.step.batch import pack
from openrlhf_ext.megatron.step.optimizer import GROUPS
from openrlhf_ext.options.sections import Megatron
from tests.megatron.exactness import algorithms, make_batch, rollout
from tests.models import make_tiny_model

META = torch.device("meta")
PLAN = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], []]


class OnMeta:
    """A model on the meta device, without weights and without DDP, that runs the micro-batches of
    ``PLAN``."""

    def build_chunks(self):
        self.device = META
        self.config.use_cpu_initialization = True
        with META:
            chunk = built.build_model(self.shape, self.config, meta=True)
        chunk.frequencies_D = chunk.frequencies_D.to(META)
        return [chunk]

    def load_weights(self):
        pass

    def _wrap(self, chunk):
        return chunk

    def __init__(self, settings):
        super().__init__(settings)
        self.config.finalize_model_grads_func = None  # that of DDP
        self.schedule.plan = lambda batch, *, forward_only: PLAN
        self.schedule.sum_metrics = lambda shares, more=(): (
            {"losses": sum(bool(share) for share in shares)},
            more,
        )

    def zero_grad(self):
        pass


class MetaPolicy(OnMeta, MegatronPolicy):
    pass


class MetaCritic(OnMeta, MegatronCritic):
    value_clip = 0.5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, "qwen3", layers=2)
    return str(path)


@pytest.fixture(autouse=True)
def counts_on_the_cpu(monkeypatch):
    """Megatron counts tokens where it believes the device to be."""
    # of DDP's buffers
    monkeypatch.setattr(policy, "gradient_squares", lambda *of: ([0.0] * len(GROUPS),) * 2)
    for module in (schedule, policy, critic):
        monkeypatch.setattr(module, "one", lambda device: torch.ones((), dtype=torch.int))


@pytest.fixture
def fetched(monkeypatch):
    """Tensors that were fetched whole."""
    fetched = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: fetched.append(tensor) or tensor)
    return fetched


def shaped_batches():
    batch = make_batch(61)
    generator = torch.Generator().manual_seed(1)
    new_N = -torch.rand(batch.responses.tokens, generator=generator)
    samples = rollout(batch, new_N, torch.rand(batch.responses.tokens, generator=generator))
    for name, algorithm in algorithms().items():
        yield name, algorithm, algorithm.prepare(new_N, algorithm.shape(samples)).lean().to(META)


@pytest.mark.parametrize(
    "layout", [ParallelLayout(1), ParallelLayout(2, context_parallel_size=2)], ids=["1", "cp2"]
)
def test_the_policys_micro_batches_with_every_algorithm(path, layout, fetched):
    with fake_rank(layout, 0):
        model = MetaPolicy(ModelSettings(path, layout, Megatron(param_dtype="fp32")))
        for name, algorithm, shaped in shaped_batches():
            assert model.accumulate_gradients(make_batch(61), shaped, algorithm)["losses"] == 3, (
                name
            )
        assert fetched == []
        model.logprobs(make_batch(61))
        assert len(fetched) == 1, "log-probs and entropies, once for all micro-batches"


@pytest.mark.parametrize("head", ["fused", "two_pass"])
def test_the_heads_gathering_under_sequence_parallelism(path, head):
    """The layers themselves are left out: some of Megatron's buffers are on the CPU here."""
    layout, rows = ParallelLayout(2, 2, sequence_parallel=True), [0, 5, 7]
    with fake_rank(layout, 0):
        model = MetaPolicy(ModelSettings(path, layout, Megatron(param_dtype="fp32", head=head)))
        part = pack(make_batch(61).select(rows), model.schedule._pack_shape).to(META)
        states_LH = torch.empty(
            len(part.packed_L) // 2, model.shape.hidden_size, device=META, requires_grad=True
        )
        _, algorithm, shaped = next(shaped_batches())
        value, _, _ = model._loss(part, states_LH, shaped.select(rows), algorithm)
        value.backward()
        assert states_LH.grad.shape == states_LH.shape


def test_the_critics_micro_batches(path, fetched):
    layout, batch = ParallelLayout(1), make_batch(61)
    count = batch.responses.tokens
    targets = ValueTargets(
        torch.zeros(count), torch.ones(count), batch.responses, torch.tensor(count)
    )
    with fake_rank(layout, 0):
        model = MetaCritic(ModelSettings(path, layout, Megatron(param_dtype="fp32")))
        assert model.accumulate_gradients(batch, targets)["losses"] == 3 and fetched == []
        model.values(batch)
        assert len(fetched) == 1
