"""What a resumed run takes from the driver's part of a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from openrlhf_ext.checkpoints.plain import read_plain, write_plain
from openrlhf_ext.driver.prompts import PromptStream
from openrlhf_ext.driver.rollouts import Rollouts
from openrlhf_ext.driver.state import loop_state, restore_loop
from openrlhf_ext.driver.waiting import Deadline
from tests.driver.simulated import Loader, Requests, options


class Maker:
    """Stands in for the experience maker."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"batches": 7, "kl": {"value": 0.25}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make_loop(requests: Requests) -> SimpleNamespace:
    stream = PromptStream(Loader(20), episodes=2)
    return SimpleNamespace(
        rollouts=Rollouts(stream, requests, options(max_staleness=1, filter_range=(0.2, 2.0)), Deadline()),
        experience=Maker(), step=7, initial_entropy=0.61, checkpointer=SimpleNamespace(best_value=0.5),
        recorder=SimpleNamespace(last_step=7, last_evaluation=6),
    )  # fmt: skip


def through_files(folder: Path, state: dict, arrays: dict) -> tuple[dict, dict]:
    write_plain(folder, "controller.json", state)
    save_file(arrays, folder / "groups.safetensors")
    return read_plain(folder / "controller.json"), load_file(folder / "groups.safetensors")


def test_the_driver_continues_where_it_was_and_no_group_is_lost_or_used_twice(tmp_path: Path) -> None:
    requests = Requests(at_once=True, stuck={2}, score=lambda prompt: float(prompt != "1"))
    loop = make_loop(requests)
    taken = [group.prompt.number for group in loop.rollouts.take(0)]  # 1 is filtered, 2 in flight
    loop.rollouts.take(1)
    requests.finish(*[key for key in requests.waiting if key != 2][:1])
    loop.rollouts.pump()
    state, arrays = through_files(tmp_path, *loop_state(loop))
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))

    again = Requests(at_once=True)
    fresh = make_loop(again)
    fresh.step, fresh.initial_entropy, fresh.recorder.last_evaluation, fresh.checkpointer.best_value = 0, None, -1, None
    restore_loop(fresh, state, arrays)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
    assert (fresh.step, fresh.initial_entropy, fresh.checkpointer.best_value) == (7, 0.61, 0.5)
    assert (fresh.recorder.last_step, fresh.recorder.last_evaluation) == (7, 6)
    assert fresh.experience.state == {"batches": 7, "kl": {"value": 0.25}}
    assert fresh.rollouts.dropped == {"filtered": 1, "late": 0}

    (waiting,) = loop.rollouts.snapshot()[1]
    batch = fresh.rollouts.take(0)
    assert again.asked[0] == 2 and waiting.prompt.number not in again.asked, "asked again: what was in flight, only"
    by_number = {group.prompt.number: group for group in batch}
    assert not by_number.keys() & {*taken, 1}
    restored = by_number[waiting.prompt.number]
    assert restored.prompt == waiting.prompt
    for one, other in zip(restored.responses, waiting.responses, strict=True):
        assert np.array_equal(one.tokens_S, other.tokens_S) and np.array_equal(one.logprobs_T, other.logprobs_T)
        assert one.tokens_S.dtype == np.int32 and one.logprobs_T.dtype == np.float32
        assert (one.actions, one.versions, one.reward, one.score, one.truncated, one.extra_logs) == (
            other.actions, other.versions, other.reward, other.score, other.truncated, other.extra_logs,
        )  # fmt: skip


@pytest.mark.parametrize("drawn", [0, 3, 5, 6, 9])
def test_the_prompts_go_on_at_their_place(drawn: int) -> None:
    whole, cut = (PromptStream(Loader(5), episodes=2) for _ in range(2))
    expected = [whole.draw() for _ in range(11)]
    assert expected[-1] is None and [prompt.number for prompt in expected[:-1]] == list(range(10))
    got = [cut.draw() for _ in range(drawn)]
    resumed = PromptStream(Loader(5), episodes=2)
    resumed.load_state_dict(cut.state_dict())
    assert [*got, *(resumed.draw() for _ in range(11 - drawn))] == expected
