"""The driver's part of a checkpoint: where the loop stands, finished groups that wait for training, prompts in flight.

Groups are arrays in a file of their own; everything else is plain values.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from openrlhf_ext.driver.prompts import Prompt
from openrlhf_ext.driver.rollouts import Group
from openrlhf_ext.rollout.response import Response

if TYPE_CHECKING:
    from openrlhf_ext.driver.loop import TrainingLoop

Arrays = dict[str, np.ndarray]


def loop_state(loop: TrainingLoop) -> tuple[dict[str, Any], Arrays]:
    """What a resumed run has to know: plain values, and the arrays of the groups that wait for training."""
    rollouts, finished, in_flight = loop.rollouts.snapshot()
    state = {
        "step": loop.step,
        "rollouts": rollouts,
        "finished": [_plain(group) for group in finished],
        "in_flight": [vars(prompt) for prompt in in_flight],
        "experience": loop.experience.state_dict(),
        "initial_entropy": loop.initial_entropy,
        "best_value": loop.checkpointer.best_value if loop.checkpointer is not None else None,
        "last_evaluation": loop.recorder.last_evaluation,
        "random_states": {
            "python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
        },
    }  # fmt: skip
    return state, _arrays([response for group in finished for response in group.responses])


def restore_loop(loop: TrainingLoop, state: Mapping[str, Any], arrays: Arrays) -> None:
    """Gives a loop that was just built the state that :func:`loop_state` described."""
    finished = _groups(state["finished"], arrays)
    loop.rollouts.restore(state["rollouts"], finished, [Prompt(**prompt) for prompt in state["in_flight"]])
    loop.step, loop.initial_entropy = state["step"], state["initial_entropy"]
    loop.experience.load_state_dict(state["experience"])
    loop.recorder.last_step, loop.recorder.last_evaluation = state["step"], state["last_evaluation"]
    if loop.checkpointer is not None:
        loop.checkpointer.best_value = state["best_value"]
    random.setstate(state["random_states"]["python"])
    np.random.set_state(state["random_states"]["numpy"])
    torch.set_rng_state(state["random_states"]["torch"])


def _plain(group: Group) -> dict[str, Any]:
    """A group without its tokens and log-probs."""
    responses = [
        {
            "actions": response.actions, "versions": response.versions, "reward": response.reward,
            "score": response.score, "truncated": response.truncated, "extra_logs": response.extra_logs,
            "tokens": len(response.tokens_S),
            "logprobs": None if response.logprobs_T is None else len(response.logprobs_T),
        }
        for response in group.responses
    ]  # fmt: skip
    return {"prompt": vars(group.prompt), "responses": responses}


def _arrays(responses: Sequence[Response]) -> Arrays:
    """Tokens and log-probs of all, one response behind the other."""
    tokens = [response.tokens_S for response in responses]
    logprobs = [response.logprobs_T for response in responses if response.logprobs_T is not None]
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *tokens]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *logprobs]),
    }


def _groups(plain: Sequence[Mapping[str, Any]], arrays: Arrays) -> list[Group]:
    """The reverse of :func:`_plain` and :func:`_arrays`."""
    used = {"tokens": 0, "logprobs": 0}

    def take(name: str, count: int | None) -> np.ndarray | None:
        if count is None:
            return None
        start = used[name]
        used[name] += count
        return arrays[name][start : start + count]

    def response(r: dict[str, Any]) -> Response:
        tokens_S, logprobs_T = take("tokens", r.pop("tokens")), take("logprobs", r.pop("logprobs"))
        return Response(tokens_S=tokens_S, logprobs_T=logprobs_T, **r)

    return [Group(Prompt(**g["prompt"]), [response(dict(r)) for r in g["responses"]]) for g in plain]
