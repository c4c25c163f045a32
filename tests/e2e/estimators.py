"""Trains two steps with every estimator on one set of Ray actors:
``python -m tests.e2e.estimators FOLDER``.

Each of them begins with the same weights and a new optimizer, and leaves its completions and its
weights.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

from openrlhf_ext.config import load_config
from openrlhf_ext.config.estimator import initial_entropy_prompts
from openrlhf_ext.driver import job, processes, settings
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.waits import call_ranks
from openrlhf_ext.options.sections.algo import CUSTOM, ESTIMATORS
from openrlhf_ext.reporting import EventLog
from tests.e2e.jobs import Task
from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S

OPTIONS = {
    **{name: {} for name in ESTIMATORS if name != "gae"},  # which has a critic: see test_ppo.py
    "dapo": {"algo__dapo__length_penalty": "{kind: dapo, l_max: 12, l_cache: 4}"},
    "gtpo_conflict": {"algo__gtpo_conflict__initial_entropy_prompts": 4},
    # two optimizer steps for each rollout batch: their token choices follow the current policy
    "clip_cov": {"train__batch_size": 16},
    "kl_cov": {"train__batch_size": 16},
    "gmpo": {"algo__old_logprobs": "engine"},
    "entropy_advantage": {"algo__entropies": "engine"},
    "grpo_s": {"algo__entropies": "engine", "algo__old_logprobs": "engine"},
    "on_policy_distillation": {"guide__model_name_or_path": "guide"},
    "mixed_policy_dapo": {"algo__mixed_policy_dapo__zero_batch": "false"},
    CUSTOM: {"algo__custom__strength": 0.5},
}
SAME_FOR_ALL = {
    "logger__samples_every": 1,
    "logger__samples_groups": 0,
    "algo__kl__init_coef": 0,
    "actor__lr_scheduler": "constant_with_warmup",
    "actor__lr_warmup_steps": 2,
    "rollout__temperature": 0.8,
    # above the noise of gradients that are nearly 0, which Adam would scale up
    "actor__adam__eps": 1e-6,
}
# Its class is known to no other process before the first shard arrives there.
OWN_METHOD = """
from __future__ import annotations
from openrlhf_ext.algorithms import TokenAlgorithm, option, register_algorithm
from openrlhf_ext.algorithms.option_blocks import ClipOptions, PartitionOptions, ScopeOptions, TruncationOptions
from openrlhf_ext.algorithms.option_blocks import Degenerate, degenerate

class SignOptions(PartitionOptions, TruncationOptions, ClipOptions, ScopeOptions):
    strength: float = option(1.0, "advantage of a success")
    degenerate: Degenerate = degenerate("zero")

@register_algorithm("reward_sign_e2e", SignOptions)
class RewardSign(TokenAlgorithm):
    def advantages(self, inputs):
        sign_B = inputs.part.success_B.double() - inputs.part.failure_B.double()
        return {"advantages": inputs.segments.spread((self.options.strength * sign_B).float())}

    def surrogate(self, log_ratio_BT, shaped):
        objective_BT, clipped_BT = super().surrogate(log_ratio_BT, shaped)
        return halved(objective_BT), clipped_BT

def halved(objective_BT):
    return 0.5 * objective_BT
"""


def config_of(task: Task, estimator: str):
    options = {"algo__advantage__estimator": estimator, **SAME_FOR_ALL, **OPTIONS[estimator]}
    if "guide__model_name_or_path" in options:
        options["guide__model_name_or_path"] = task.folder / "guide"
    if estimator == "custom":
        options["algo__module_path"] = task.folder / "own_method.py"
    return load_config(task.options(estimator, **options))


def main(folder: Path) -> None:
    task = Task(folder)
    (folder / "own_method.py").write_text(OWN_METHOD)
    make_tiny_policy(folder / "guide", seed=1)
    base = config_of(task, "on_policy_distillation")  # ranks that hold a guide
    # engines that tell entropies, for the estimators that ask for theirs
    processes.engine_entropies = lambda _: True
    session = RaySession(policy_ranks=2, engines=1, env=settings.worker_env(base), verbose=False)
    with session:
        parts = job.build_parts(base, session, EventLog())
        ask = partial(call_ranks, parts.policy, "policy", timeout_s=PATIENCE_S)
        start = str(folder / "start")
        ask("save_state", folder=start, name="policy", background=False)
        for estimator in OPTIONS:
            config = config_of(task, estimator)
            ask("load_state", folder=start, name="policy")
            loop = job.build_loop(dataclasses.replace(parts, config=config))
            if "engine" in (config.algo.entropies, config.algo.old_logprobs):
                loop.publish()  # the engine has the weights of the estimator before
            if initial_entropy_prompts(config):
                job.set_initial_entropy(loop)
            loop.run()
            loop.recorder.close()
            ask("save_model", path=config.ckpt.output_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
