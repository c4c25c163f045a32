"""Everything of OpenRLHF 0.11.2 that this package uses, met in one place.

``tests/test_compat.py`` pins the signatures and fields relied on, so that an upgrade shows its drift there and not in a
run. Importing this module imports OpenRLHF's Ray side (and with it vLLM and DeepSpeed): only processes of a running job
do so. The import shims of ``openrlhf_ext.patches`` must be active before.
"""

from __future__ import annotations

from openrlhf_ext import patches

patches.apply()

# ruff: noqa: E402  (the patches must be active before OpenRLHF is imported)
import logging

from openrlhf.datasets import PromptDataset
from openrlhf.datasets.utils import blending_datasets
from openrlhf.trainer.ppo_trainer import BasePPOTrainer, compute_eval_metrics
from openrlhf.trainer.ppo_trainer import PPOTrainer as _PPOTrainerRemote
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ppo_utils.samples_generator import _collect_prompt_batch as collect_prompt_batch
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.utils import get_bundle_indices
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor as _RolloutRayActorRemote
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger
from openrlhf.utils.utils import get_strategy, get_tokenizer

SUPPORTED_OPENRLHF = "0.11.2"


def plain_class(remote_class: object) -> type:
    """The class behind a ``@ray.remote`` class, which Ray forbids to subclass (ActorClassInheritanceException)."""
    return remote_class.__ray_metadata__.modified_class.__mro__[1]


PPOTrainer = plain_class(_PPOTrainerRemote)
RolloutRayActor = plain_class(_RolloutRayActorRemote)


def quiet_upstream_logs(level: int = logging.WARNING) -> None:
    """OpenRLHF installs its own handler per module logger at import; raise the level of all of them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("openrlhf.") and isinstance(logger, logging.Logger):
            logger.setLevel(level)


__all__ = [
    "AgentExecutorBase", "BasePPOTrainer", "Experience", "MultiTurnAgentExecutor", "PPOTrainer",
    "PromptDataset", "RayActorGroup", "RemoteExperienceMaker", "RolloutRayActor", "SUPPORTED_OPENRLHF",
    "SamplesGenerator", "SingleTurnAgentExecutor", "TensorboardLogger", "WandbLogger", "batch_vllm_engine_call",
    "blending_datasets", "collect_prompt_batch", "compute_eval_metrics", "get_bundle_indices", "get_strategy",
    "get_tokenizer", "plain_class", "quiet_upstream_logs",
]  # fmt: skip
