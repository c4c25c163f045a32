"""PPO with a critic, then grpo with a KL penalty, on one set of Ray actors: ``python -m tests.e2e.ppo FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from openrlhf_ext.config import load_config
from openrlhf_ext.controller import job, settings
from openrlhf_ext.controller.session import RaySession
from tests.e2e.jobs import Task

# the policy has tensor parallelism 2, the critic two copies on ranks of its own
CRITIC = {
    "algo__advantage__estimator": "gae", "algo__advantage__lambd": 0.95, "critic__num_gpus_per_node": 2,
    "critic__megatron__tensor_parallel_size": 1, "critic__adam__lr": 1e-3, "critic__freezing_steps": 0,
    "critic__save_value_network": "true", "train__batch_size": 16,
}  # fmt: skip
ADAPTIVE_KL = {"algo__kl__init_coef": 0.05, "algo__kl__target": 0.01, "algo__kl__horizon": 100}
IN_LOSS = {"algo__kl__init_coef": 0.1, "algo__kl__estimator": "k3", "algo__kl__use_loss": "true"}


def main(folder: Path) -> None:
    task = Task(folder)
    base = load_config(task.options("ppo", **CRITIC, **ADAPTIVE_KL))
    session = RaySession(policy_ranks=base.training_ranks, engines=1, env=settings.worker_env(base), verbose=False)
    with session:
        parts = job.build_parts(base, session)
        for config in (base, load_config(task.options("grpo", **IN_LOSS))):
            trainer = job.build_trainer(config, parts)
            trainer.fit()
            trainer.recorder.close()
        parts.companions.save(base)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
