"""Everything of OpenRLHF 0.11.2 that this package uses, met in one place.

``tests/test_compat.py`` pins the signatures and fields relied on. Importing this module imports
OpenRLHF's Ray side, without vLLM, DeepSpeed and OpenRLHF's own models: those come when they are
first used (patches/openrlhf_imports.py), which in the driver they never are.
"""

from __future__ import annotations

from openrlhf_ext.patches import apply

apply()

# ruff: noqa: E402  (the patches must be active before OpenRLHF is imported)
import logging
import os
from types import SimpleNamespace
from typing import Any

from openrlhf.trainer.ray.vllm_engine import RolloutRayActor as _RolloutRayActorRemote
from openrlhf.utils.agent import AgentExecutorBase as AgentExecutorBase
from openrlhf.utils.agent import MultiTurnAgentExecutor as MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger

from openrlhf_ext.redaction import HIDDEN, redacted


def plain_class(remote_class: Any) -> type:
    """The class behind a ``@ray.remote`` class, which Ray forbids to subclass
    (ActorClassInheritanceException)."""
    return remote_class.__ray_metadata__.modified_class.__mro__[1]


RolloutRayActor = plain_class(_RolloutRayActorRemote)


def get_tokenizer(path: str, padding_side: str = "left", use_fast: bool = True) -> Any:
    """The tokenizer of a model folder as OpenRLHF's function of this name sets it up, which
    executes Python files that the folder names (``trust_remote_code``): here none is."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, use_fast=use_fast)
    tokenizer.padding_side = padding_side
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def quiet_upstream_logs() -> None:
    """OpenRLHF installs its own handler per module logger at import; raise the level of all of
    them."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("openrlhf.") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.WARNING)


def build_sinks(args: Any) -> list:
    """OpenRLHF's loggers that the options ask for; without secrets, which W&B would show."""
    wanted = (
        (WandbLogger, args.logger.wandb.key),
        (TensorboardLogger, args.logger.tensorboard_dir),
    )
    if args.logger.wandb.key:
        # asked first (openrlhf/utils/logging_utils.py:68)
        os.environ.setdefault("WANDB_API_KEY", args.logger.wandb.key)
    shown = _without_passwords(args)
    shown.logger.wandb.key = HIDDEN
    return [logger(shown) for logger, is_wanted in wanted if is_wanted]


def _without_passwords(args: SimpleNamespace) -> SimpleNamespace:
    inner = {
        name: _without_passwords(value) if isinstance(value, SimpleNamespace) else redacted(value)
        for name, value in vars(args).items()
    }
    return SimpleNamespace(**inner)
