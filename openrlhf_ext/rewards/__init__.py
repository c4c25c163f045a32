"""Grading of completions by user code, in processes that can be stopped.

The names below load on first use: a grading worker imports this package and must stay light.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "FailurePolicy": "failures",
    "GradedSingleTurnExecutor": "executor",
    "GradedAgentExecutor": "agent",
    "Grader": "grader",
    "HttpReward": "http_reward",
    "RewardError": "errors",
    "RewardFailureLimit": "errors",
    "RewardImportError": "errors",
    "RewardInvalid": "errors",
    "RewardPool": "pool",
    "RewardPoolClosed": "errors",
    "RewardRaised": "errors",
    "RewardResult": "result",
    "RewardServerError": "errors",
    "RewardSettings": "grader",
    "RewardTimeout": "errors",
    "RewardWorkerDied": "errors",
    "answers_equal": "answers",
    "check_reward_file": "pool",
    "extract_answer": "answers",
    "load_agent": "agent",
    "make_agent_executor": "agent",
    "make_executor": "executor",
    "open_grader": "grader",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
