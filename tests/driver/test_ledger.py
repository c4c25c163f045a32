"""Drivers that are killed between any two events: every prompt is trained exactly once, or named
with its reason."""

from __future__ import annotations

import copy
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_ext.driver.data import PromptData
from openrlhf_ext.driver.job import begin_ledger
from openrlhf_ext.driver.rollouts import Group, PromptStream, Rollouts
from openrlhf_ext.rollout.response import Response
from openrlhf_ext.run.ledger import TIME_IS_UP, USED_UP, Audit
from tests.driver.simulated import Loader, Requests
from tests.driver.test_loop import Ready, World

PROMPTS = 11


class Killed(BaseException):
    """SIGKILL, as far as a test can: nothing handles it."""


class Unsteady(Requests):
    """Groups finish in any order; those of the prompts 1, 4, ... are filtered, of 5 the policy
    wrote nothing."""

    def __init__(self, life: Life) -> None:
        super().__init__(score=lambda text: 1.0 if int(text) % 3 == 1 else 0.5)
        self.life = life

    def answers(self, timeout_s: float) -> list:
        self.life.tick()
        waiting, chance = list(self.waiting), self.life.chance
        self.finish(
            *chance.sample(
                waiting, chance.randint(int(timeout_s > 0 and bool(waiting)), len(waiting))
            )
        )
        nothing = Response.empty([1, 2], 0.0, {"reward_failed": 1.0})
        return [
            (
                key,
                [nothing, *made[1:]] if not isinstance(key, tuple) and key % PROMPTS == 5 else made,
            )
            for key, made in super().answers(timeout_s)
        ]


class Life:
    """A run through all of its attempts. ``trained``: numbers by step, as the policy got them;
    ``kills`` says after how many events an attempt ends; ``spoil`` changes the first checkpoint
    that has something of everything, and the attempt ends there."""

    def __init__(
        self, folder: Path, seed: int, kills: list[int], episodes: int = 2, **train: Any
    ) -> None:
        self.folder, self.chance, self.kills, self.train = folder, random.Random(seed), kills, train
        self.episodes, self.left = episodes, 0
        self.trained: dict[int, list[int]] = {}
        self.saved: tuple[dict, dict] | None = None
        self.spoil: Any = None
        self.found: list[str] = []  # while it went on

    @property
    def path(self) -> Path:
        return self.folder / "ledger.jsonl"

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    def attempt(self) -> None:
        """Goes on from what was saved last; raises Killed."""
        self.left = self.kills.pop(0) if self.kills else -1
        loop = Attempt(self).loop
        try:
            loop.run()
        except Killed:
            # SIGTERM in the place of SIGKILL saves the last finished step
            if self.chance.random() < 0.3:
                loop.guard.received, loop.guard.received_at = signal.SIGTERM, time.monotonic()
                loop.guard.ignore_signals = lambda: None
                loop.save_before_the_end()
            raise
        loop.close_logs()

    def live(self) -> Audit:
        while True:
            try:
                self.attempt()
            except Killed:
                continue
            return Audit(self.path)


class Attempt(World):
    def __init__(self, life: Life) -> None:
        super().__init__(
            eval={"steps": 2, "n_samples_per_prompt": 1},
            train={"num_episodes": life.episodes, **life.train},
            algo={"dynamic_filtering_enable": True, "dynamic_filtering_range": (0.0, 1.0)},
            logger={"metrics_path": str(life.path.with_name("metrics.jsonl"))},
        )
        self.life, self.requests, loader = life, Unsteady(life), Loader(PROMPTS)
        self.loop.rollouts = Rollouts(
            PromptStream(loader, life.episodes), self.requests, self.loop.config, Ready()
        )
        self.loop.recorder.close = lambda: None
        self.loop.checkpointer.save_before_the_end = lambda state, timeout_s: self.save_last(*state)
        if life.saved is not None:
            self.loop.restore(*copy.deepcopy(life.saved))
        step = self.loop.step
        life.trained = {made: numbers for made, numbers in life.trained.items() if made <= step}
        self.version = self.requests.version = max(0, step - 1)
        sources, texts, labels = map(list, zip(*list.__iter__(Loader(PROMPTS)), strict=True))
        prompts = PromptData(texts, labels, sources, 0, range(PROMPTS))
        self.loop.prompts = prompts
        begin_ledger(self.loop)

    def make(self, groups: list[Group], *given: Any, **named: Any) -> Any:
        self.life.trained[self.loop.step + 1] = [group.prompt.number for group in groups]
        return super().make(groups, *given, **named)

    def tell(self, what: str) -> None:
        self.life.tick()
        super().tell(what)

    def ask(self, method: str, *shares: Any) -> list:
        answer = super().ask(method, *shares)
        self.requests.version = self.version
        return answer

    def record(self, step: int, metrics: dict, engines: list) -> dict:
        self.life.tick()
        return metrics

    def save(self, step: int, evaluation: dict | None, state: Any, record: dict | None) -> None:
        self.life.tick()
        self.life.found += Audit(self.life.path).faults
        if self.life.chance.random() < 0.3:
            return  # not due
        self.life.saved = plain, _ = copy.deepcopy(state())
        if self.life.spoil is not None and has_everything(plain):
            self.life.spoil, spoil = None, self.life.spoil
            spoil(plain)
            raise Killed
        self.life.tick()

    def save_last(self, plain: dict, arrays: dict) -> None:
        if self.life.saved is None or plain["step"] > self.life.saved[0]["step"]:
            self.life.saved = copy.deepcopy((plain, arrays))


def check_exactly_once(life: Life, audit: Audit) -> None:
    """Against what the policy got."""
    assert life.found + audit.faults == [] and (audit.end, audit.proved) == (USED_UP, life.episodes)
    trained = Counter(number for numbers in life.trained.values() for number in numbers)
    assert set(trained.values()) <= {1} and audit.counts["trained"] == len(trained)
    unstarted = {number for number in range(PROMPTS * life.episodes) if number % PROMPTS == 5}
    filtered = {number for number in range(PROMPTS * life.episodes) if number % PROMPTS % 3 == 1}
    assert not set(trained) & (unstarted | filtered)
    assert audit.counts["filtered"] == len(filtered) and audit.counts["unstarted"] == len(unstarted)
    assert sum(audit.counts.values()) == audit.drawn == PROMPTS * life.episodes


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    kills=st.lists(st.integers(1, 40), max_size=12),
    staleness=st.integers(0, 4),
    late=st.sampled_from(["train", "drop", "wait"]),
)
def test_whenever_it_is_killed_every_prompt_is_trained_once_or_named(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kills: list[int], staleness: int, late: str
) -> None:
    life = Life(
        tmp_path_factory.mktemp("life"), seed, kills, max_staleness=staleness, late_groups=late
    )
    check_exactly_once(life, life.live())


# ---- the check notices


def has_everything(state: dict) -> bool:
    """Groups that are finished, others in flight, some that were given up since the line, and a
    place in the data."""
    drawn = state["rollouts"]["prompts"]["loader"]["drawn"]
    return (
        bool(state["finished"] and state["in_flight"] and state["rollouts"]["given_up"])
        and 1 < drawn < PROMPTS - 1
    )


def killed_with_everything(folder: Path, spoil: Any = lambda state: None) -> Life:
    """A run that was killed when it had saved such a state, which was then spoiled."""
    for seed in range(50):
        life = Life(folder, seed, [], max_staleness=3, late_groups="train")
        life.spoil = spoil
        try:
            life.attempt()
        except Killed:
            return life
    raise AssertionError("no checkpoint had everything")


def lose_a_finished(state: dict) -> None:
    state["finished"].pop()


def lose_one_in_flight(state: dict) -> None:
    state["in_flight"].pop()


def double_a_finished(state: dict) -> None:
    state["in_flight"].append(state["finished"][-1]["prompt"])


def one_prompt_too_far(state: dict) -> None:
    state["rollouts"]["prompts"]["loader"]["drawn"] += 1


def one_prompt_too_early(state: dict) -> None:
    state["rollouts"]["prompts"]["loader"]["drawn"] -= 1


def forget_a_reason(state: dict) -> None:
    state["rollouts"]["given_up"] = {}


def count_one_more(state: dict) -> None:
    state["rollouts"]["prompts"]["drawn"] += 1


MUTATIONS = [
    (lose_a_finished, r"prompt \d+ is lost resuming from step \d"),
    (lose_one_in_flight, r"prompt \d+ is lost resuming from step \d"),
    (
        double_a_finished,
        r"prompt (\d+) waits resuming from step \d, 2 times(.|\n)*\1 is trained at step \d+, and "
        r"was",
    ),
    (one_prompt_too_far, r"are not those of the data, each once: .* resumed from step \d"),
    (
        one_prompt_too_early,
        r"are not those of the data, each once: .* resumed from step \d; twice there: \d+, \d+",
    ),
    (
        forget_a_reason,
        r"prompt \d+ is lost resuming from step \d: neither trained, nor given up, nor waiting",
    ),
    (count_one_more, r"prompt \d+ is lost resuming from step \d"),
]


@pytest.mark.parametrize(
    ("spoil", "said"), MUTATIONS, ids=[spoil.__name__ for spoil, _ in MUTATIONS]
)
def test_a_checkpoint_that_lost_doubled_or_forgot_something_is_found(
    tmp_path: Path, spoil: Any, said: str
) -> None:
    audit = killed_with_everything(tmp_path, spoil).live()
    assert re.search(said, "\n".join(audit.faults)), audit.faults


def test_what_was_not_trained_when_the_time_was_up_is_named_and_a_resumed_run_trains_it(
    tmp_path: Path,
) -> None:
    life = killed_with_everything(tmp_path)
    life.train["max_minutes"] = 1e-9
    audit = life.live()
    assert (
        audit.faults == []
        and audit.end == TIME_IS_UP
        and audit.counts["in_flight"] + audit.counts["queued"] > 0
    )
    assert "the run ended after step" in audit.lines[-1] and TIME_IS_UP in audit.lines[-1]
    life.train["max_minutes"] = None
    check_exactly_once(life, life.live())


def test_a_run_that_goes_on_with_more_episodes_is_one_account(tmp_path: Path) -> None:
    life = Life(tmp_path, 1, [], episodes=1, max_staleness=1, late_groups="train")
    check_exactly_once(life, life.live())
    life.episodes = 3
    check_exactly_once(life, life.live())


def test_a_checkpoint_of_an_earlier_release_is_accounted_for_from_its_step_on(
    tmp_path: Path,
) -> None:
    life = killed_with_everything(tmp_path, lambda state: state["rollouts"].pop("given_up"))
    step = life.saved[0]["step"]
    life.path.unlink()
    audit = life.live()
    assert audit.faults == [] and audit.since == step > 0 and audit.end == USED_UP
    assert (
        f"from step {audit.since} on: another run folder or an earlier release has the steps before"
        in audit.lines
    )
