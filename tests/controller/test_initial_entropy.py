"""``<H>_ini`` of gtpo_conflict: when it is measured, what is measured, and that the algorithm gets it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from openrlhf_ext.controller import data, job
from openrlhf_ext.controller.deadline import Deadline
from openrlhf_ext.controller.trainer import PolicyTrainer
from openrlhf_ext.megatron.policy import LogprobEntropy

PROMPT = [5, 6]
SAMPLING = {"temperature": 0.7, "max_new_tokens": 4}


@pytest.fixture
def trainer():
    """Two prompts with completions [2, 4] and [9]; a token's entropy is a tenth of its id."""
    trainer = PolicyTrainer.__new__(PolicyTrainer)
    trainer.asked = []

    def generate(**kwargs: object) -> list[SimpleNamespace]:
        trainer.asked.append(kwargs)
        pairs = (([2, 4], 3), ([9], 2))
        return [
            SimpleNamespace(
                sequences=torch.tensor([PROMPT + completion]), action_mask=torch.tensor([[0] + [1] * (steps - 1)])
            )
            for completion, steps in pairs
        ]

    def entropies(batch) -> LogprobEntropy:
        values = torch.where(batch.mask_BT, batch.targets_BT / 10, 0.0)
        return LogprobEntropy(torch.zeros_like(values), values)

    trainer.make_generator = lambda prompts, held_out, deadline: SimpleNamespace(generate_eval_samples=generate)
    trainer._forget_evaluation = lambda: trainer.asked.append("forgotten")
    trainer.deadline, trainer.limits = Deadline(), SimpleNamespace(rollout_timeout_s=60.0)
    trainer.experience_maker = SimpleNamespace(old_logprobs=entropies, algorithm=None)
    trainer.generate_kwargs, trainer.initial_entropy = SAMPLING, None
    trainer.recorder = SimpleNamespace(writer=SimpleNamespace(write=lambda *record: trainer.asked.append(record)))
    return trainer


def test_it_is_the_mean_over_completions_of_their_means(trainer):
    assert trainer.measure_initial_entropy(None) == pytest.approx(((0.2 + 0.4) / 2 + 0.9) / 2)
    # No n_samples_per_prompt: then OpenRLHF samples rollout.n_samples_per_prompt, as in training.
    assert trainer.asked == [SAMPLING, "forgotten"]


def test_the_algorithm_gets_it_and_a_resumed_run_keeps_it(trainer, monkeypatch):
    config = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator="gtpo_conflict")),
        initial_entropy_prompts=7,
        algorithm_options=lambda: ("gtpo_conflict", {"gamma": 0.3}, {"level": "token"}),
    )
    taken = []
    parts = SimpleNamespace(strategy=None, prompts=SimpleNamespace(first=lambda count: taken.append(count)))
    monkeypatch.setattr(data, "dataloader", lambda strategy, prompts: prompts)
    job.set_initial_entropy(config, trainer, parts)
    algorithm = trainer.experience_maker.algorithm
    assert algorithm.options.h_ini == trainer.initial_entropy == pytest.approx(0.6)
    assert algorithm.options.gamma == 0.3 and algorithm.correction.level == "token" and taken == [7]
    assert trainer.asked[-1] == (0, {"algorithm/initial_entropy": trainer.initial_entropy})

    trainer.initial_entropy = 0.123
    job.set_initial_entropy(config, trainer, parts)
    assert trainer.experience_maker.algorithm.options.h_ini == 0.123 and taken == [7]
