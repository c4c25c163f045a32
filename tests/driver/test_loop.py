"""The order of a run's steps, with stand-ins for ranks and engines."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import RayTaskError
from safetensors.numpy import load_file, save_file

from openrlhf_ext.algorithms import get_algorithm
from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.checkpoints.files import read_plain, write_plain
from openrlhf_ext.driver import data, job
from openrlhf_ext.driver.evaluation import HeldOut
from openrlhf_ext.driver.guard import Guard
from openrlhf_ext.driver.loop import TrainingLoop
from openrlhf_ext.driver.profiler import StepProfiler
from openrlhf_ext.driver.progress import Progress
from openrlhf_ext.driver.rollouts import Group, PromptStream, Rollouts, all_prompts
from openrlhf_ext.driver.waits import Deadline
from openrlhf_ext.megatron.step import NonFiniteUpdateError
from openrlhf_ext.megatron.step.batch import LogprobEntropy
from openrlhf_ext.options.sections import HeldOutSet
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.rollout.response import derived_seed
from openrlhf_ext.run.checkpoints import Resumed
from openrlhf_ext.run.judge import StepJudge
from tests.driver.simulated import Loader, Requests, options


class Ready(Deadline):
    """Calls of the stand-ins are their results."""

    def get(self, refs: list, meanwhile: Any = None) -> list:
        assert self.remaining > 0
        if meanwhile is not None:
            meanwhile()
        return refs


def held_out(name: str = "", samples: int = 3, **options: Any) -> HeldOut:
    """Two prompts."""
    given = {
        "paths": "h",
        "temperature": 0.6,
        "top_p": 1.0,
        "max_new_tokens": None,
        "remote_url": None,
        **options,
    }
    return HeldOut(
        HeldOutSet(name=name, n_samples_per_prompt=samples, **given),
        all_prompts(Loader(2, first=100)),
    )


class World:
    """Everything around the loop; ``told`` lists what happened in order."""

    def __init__(self, *, with_critic: bool = False, **sections: dict[str, Any]) -> None:
        self.told: list[Any] = []
        self.version, self.grad_norm = 0, 0.5
        self.shares: list[tuple[Fraction, ...]] = []  # of the run, before and behind each step
        self.saved: dict[int, Any] = {}
        self.saved_last: list[Any] = []
        self.during: dict[str, Any] = {}  # what happens while this is told
        sections = {"eval": {"steps": 2, "n_samples_per_prompt": 3}, **sections}
        config = options(more=sections)
        deadline = Ready()
        self.requests = Requests(at_once=True)
        experience = SimpleNamespace(
            make=self.make,
            described=lambda made, get: made,
            scoring=SimpleNamespace(old_logprobs=self.old_logprobs, engine_entropies=False),
            algorithm=get_algorithm("grpo"),
            load_state_dict=lambda state: None,
            state_dict=lambda: {"batches": self.loop.step},
            critic=SimpleNamespace(start_fit=self.fit_critic) if with_critic else None,
        )
        self.loop = TrainingLoop(
            **unused_parts(),
            config=config,
            session=SimpleNamespace(guard=Guard()),
            events=EventLog(),
            policy=self,
            rollouts=Rollouts(PromptStream(Loader(6), 1), self.requests, config, deadline),
            experience=experience,
            supervisor=SimpleNamespace(
                repeat_until_sent=lambda sync: sync(), ask=self.ask, restarts=0, there={0: 0}
            ),
            sharing=SimpleNamespace(
                wake_weights=lambda: None, make_room_for_policy=lambda: self.told.append("room")
            ),
            deadline=deadline,
            recorder=SimpleNamespace(
                progress=SimpleNamespace(total_steps=3),
                last_evaluation=-1,
                step=self.record,
                evaluation=self.evaluated,
                samples=SimpleNamespace(groups_due=lambda step: None),
                held_out=SimpleNamespace(groups_due=lambda step: None),
                writer=SimpleNamespace(write=lambda *record: self.told.append(record)),
                repeat_from=lambda step, dropped: self.told.append(
                    f"repeat from {step}, {dropped['skipped']} skipped"
                ),
            ),
            gauges=SimpleNamespace(collect=lambda batch, metrics: {}),
            judge=StepJudge(config),
            progress=Progress(6, config.rollout.batch_size),
            held_out=[held_out()],
            tokenizer=SimpleNamespace(batch_decode=lambda tokens: [""] * len(tokens)),
            profiler=StepProfiler(self, config, 3, EventLog()),
            checkpointer=SimpleNamespace(
                after_step=self.save,
                finish=lambda: self.told.append("finish"),
                poll=lambda: None,
                save_before_the_end=lambda state, timeout_s: self.saved_last.append(
                    (state, timeout_s)
                ),
                go_back=self.go_back,
            ),
        )
        self.loop.ledger = SimpleNamespace(
            append=lambda line: None, keep=lambda keep: None, close=lambda: None
        )
        self.loop.repeats = SimpleNamespace(add=lambda entries: 0, read=lambda: None)

    def tell(self, what: str) -> None:
        self.told.append(what)
        self.during.pop(f"{what} {self.loop.step}", lambda: None)()

    def make(self, groups: list[Group], version: int, get: Any, shown: int | None) -> Any:
        self.tell("score")
        self.told[-1] = f"score {[group.prompt.number for group in groups]} at {version}"
        return SimpleNamespace(
            shards=["shard"],
            batch=None,
            old=None,
            metrics={"tokens/generated": 8.0},
            groups=groups,
            samples=[],
        )

    def old_logprobs(self, batch: Any, get: Any) -> LogprobEntropy:
        """A token's entropy is a tenth of its id."""
        values = batch.targets_N / 10
        return LogprobEntropy(torch.zeros_like(values), values)

    def fit_critic(self, *shares: Fraction) -> list:
        self.told.append("fit critic")
        return [{"loss/value": 1.0}]

    def ask_replicas(self, method: str, parts: list) -> list:
        assert (method, parts) == ("take_shard", ["shard"])
        return [None]

    def ask(self, method: str, *shares: Fraction) -> list:
        if method == "fit":
            self.shares.append(shares)
        if method in ("weight_version", "rollout_stats"):
            return self._of_engines(method)
        self.tell(method)
        self.version += method == "send_weights"
        if method == "send_weights":
            return [{"weight_sync/version": self.version}]
        return [{"loss/policy": 0.1, "grad_norm": self.grad_norm}]

    def go_back(self, why: str) -> Resumed:
        if not self.saved:
            raise CheckpointError(f"{why}, and there is no checkpoint")
        step = max(self.saved)
        self.version = step - 1  # of the sync that follows
        assert self.told.pop() == "room"
        self.told.append(f"load {step}")
        return Resumed(Path("."), step, *self.saved[step])

    def _of_engines(self, method: str) -> list:
        if method == "weight_version":
            return [self.version]
        stats = dict.fromkeys(("exposed_grading_s", "drafts", "accepted"), 0)
        return [{"generation_s": 0.1, "reward_failures": [], **stats}]

    def record(self, step: int, metrics: dict, engines: list) -> dict:
        assert metrics["time/step"] > 0 and metrics["groups/in_flight"] == 0
        self.told.append(f"record {step}")
        return metrics

    def evaluated(self, step: int, logs: dict) -> None:
        self.tell("evaluating")
        self.told.pop()
        self.loop.recorder.last_evaluation = step
        self.told.append(f"evaluate {step}")

    def save(self, step: int, evaluation: dict | None, state: Any, record: dict | None) -> None:
        assert record is not None and "time/step" in record
        self.saved[step] = state()
        self.told.remove("room")
        self.told.append(f"save {step} {'after its evaluation' if evaluation else 'alone'}")


def test_a_run_from_the_first_to_the_last_step() -> None:
    world = World()
    world.loop.run()
    step = ["fit", "send_weights"]
    assert world.told == [
        "evaluate 0",
        "score [0, 1] at 0",
        *step,
        "record 1",
        "save 1 alone",
        "score [2, 3] at 1",
        *step,
        "record 2",
        "evaluate 2",
        "save 2 after its evaluation",
        "score [4, 5] at 2",
        *step,
        "record 3",
        "save 3 alone",
        "finish",
        "evaluate 3",
    ]


def test_the_step_after_which_the_time_is_up_is_the_last_one() -> None:
    world = World(eval={"steps": -1}, train={"max_minutes": 0.001})
    world.during["fit 0"] = lambda: time.sleep(0.1)
    world.loop.run()
    assert world.told[-4:] == ["record 1", "save 1 alone", "finish", "evaluate 1"]


def test_that_a_step_has_no_gradient_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.grad_norm = 0.0
    world.loop.run()
    (said,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith(
        "step 1 has no gradient: no completion of a group is better than another"
    ), said


def test_a_resumed_run_publishes_what_it_has_loaded_and_does_not_evaluate_it_again() -> None:
    world = World()
    world.loop.step, world.version, world.loop.recorder.last_evaluation = 4, 3, 4
    world.loop.run()
    assert world.told[:2] == ["send_weights", "score [0, 1] at 4"] and world.loop.version == 7


def test_a_checkpoint_written_in_the_background_is_looked_for_while_the_next_step_goes_on() -> None:
    world = World(eval={"steps": -1})
    looks: list[str] = []
    world.loop.checkpointer.poll = lambda: looks.append(world.told[-1])
    world.loop.run()
    assert looks[2:4] == ["save 1 alone", "fit"], "after sampling, and after training"


# ---- rollbacks


def not_finite() -> None:
    error = NonFiniteUpdateError("the gradient norm nan")
    raise RayTaskError("fit", "", error)


def test_a_step_that_is_not_finite_is_undone_and_its_prompts_are_left_out(tmp_path: Path) -> None:
    world = World(train={"rollback_on": ["nan"]}, ckpt={"save_steps": 1}, eval={"steps": -1})
    world.during["fit 1"] = not_finite
    with EventLog(tmp_path / "events.jsonl") as world.loop.events:
        world.loop.run()
    assert world.told[5:] == [
        "save 1 alone",
        "score [2, 3] at 1",
        "fit",
        "load 1",
        "repeat from 1, 0 skipped",
        "send_weights",
        "score [4, 5] at 1",
        "fit",
        "send_weights",
        "record 2",
        "save 2 alone",
        "finish",
        "evaluate 2",
    ]
    ((_, event),) = read_lines(tmp_path / "events.jsonl")
    del event["time"]
    assert event == {
        "event": "rollback",
        "step": 2,
        "why": "the gradient norm nan",
        "to": 1,
        "prompts": [2, 3],
        "rollbacks": 1,
    }
    assert world.loop.rollouts.gauges()["groups/dropped_skipped"] == 2


def test_sigterm_that_came_in_a_step_that_is_undone_ends_the_run_at_the_checkpoint() -> None:
    world = World(train={"rollback_on": ["nan"]}, ckpt={"save_steps": 1}, eval={"steps": -1})
    world.loop.guard.listen()
    world.during["fit 1"] = lambda: (signal.raise_signal(signal.SIGTERM), not_finite())
    with pytest.raises(KeyboardInterrupt):
        world.loop.run()
    world.loop.save_before_the_end()
    ((state, _),) = world.saved_last
    assert state[0]["step"] == 1 and state[0]["rollouts"]["skip"] == [2, 3]


@pytest.mark.parametrize("asked", [None, ["spike"], ["nan"]])
def test_what_was_not_asked_for_or_cannot_be_undone_ends_the_run(asked: list | None) -> None:
    world = World(train={"rollback_on": asked}, ckpt={"save_steps": 1}, eval={"steps": -1})
    world.during["fit 0"] = not_finite
    with pytest.raises(CheckpointError if asked == ["nan"] else RayTaskError) as raised:
        world.loop.run()
    assert "the gradient norm nan" in str(getattr(raised.value, "cause", raised.value))


def test_a_spike_is_undone_before_the_engines_and_a_checkpoint_get_it() -> None:
    world = World(train={"rollback_on": ["spike"]}, ckpt={"save_steps": 1}, eval={"steps": -1})
    world.loop.judge.norms = [0.5] * 5

    def spike() -> None:
        world.grad_norm = 5.1
        world.during["send_weights 1"] = lambda: setattr(world, "grad_norm", 0.5)

    world.during["fit 1"] = spike
    world.loop.run()
    assert world.told[6:11] == [
        "score [2, 3] at 1",
        "fit",
        "load 1",
        "repeat from 1, 0 skipped",
        "send_weights",
    ]
    assert world.loop.judge.norms == [0.5] * 7, "that of the step is none that others are judged by"
    assert world.saved.keys() == {1, 2}


def judge_of(**train: Any) -> StepJudge:
    return StepJudge(options(more={"train": train}))


def test_a_spike_is_above_a_multiple_of_the_median_of_accepted_steps() -> None:
    judge = judge_of(rollback_on=["spike"], spike_factor=2.0)
    # the first five are not judged; without a gradient there is none
    for norm in (9.0, 1.0, 0.0, 1.0, 1.0, 50.0, 1.0):
        assert judge.accepted(lambda norm=norm: {"grad_norm": norm})
    assert judge.accepted(lambda: {"grad_norm": 2.1}) is None
    assert (
        judge.why
        == "the gradient's norm 2.1 is above 2 (train.spike_factor) times 1, the median of 6 steps"
    )
    assert (
        judge.accepted(lambda: {"grad_norm": 2.0}) == {"grad_norm": 2.0} and len(judge.norms) == 7
    )
    for _ in range(30):
        assert judge.accepted(lambda: {"grad_norm": 1.5})
    assert len(judge.norms) == 20
    assert judge_of().accepted(lambda: {"grad_norm": 1e9}) and judge.accepted(
        lambda: {"loss/value": 1.0}
    )


def test_rollbacks_without_a_new_checkpoint_end() -> None:
    judge = judge_of(rollback_on=["nan"])
    for step in (4, 4, 4, 6, 6, 6):
        judge.count(step)
    assert judge.rollbacks == 6
    with pytest.raises(
        RuntimeError, match="would be rollback 4 to step 6 without a new checkpoint"
    ):
        judge.count(6)


# ---- SIGTERM


@pytest.fixture(autouse=True)
def handlers():
    """The signals of the test's process are its own again."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(when: str, how: signal.Signals = signal.SIGTERM, **ckpt: Any) -> World:
    """A run that gets a signal; afterwards ``saved_last`` has what was saved because of it."""
    world = World(eval={"steps": 2, "n_samples_per_prompt": 3}, ckpt=ckpt)
    world.loop.guard.listen()
    world.during[when] = lambda: (signal.raise_signal(how), time.sleep(0.2))
    with pytest.raises(KeyboardInterrupt):
        world.loop.run()
    world.loop.save_before_the_end()
    return world


def test_sigterm_saves_what_the_last_finished_step_would_have_saved() -> None:
    """The state is that of the step's own checkpoint, which a resumed run continues from bit for
    bit."""
    world = interrupted("score 1")
    ((state, timeout_s),) = world.saved_last
    plain, arrays = state
    expected, _ = world.saved[1]
    assert (
        plain["step"] == 1
        and repr(plain) == repr(expected)
        and set(arrays) == {"tokens", "logprobs", "entropies"}
    )
    assert "record 2" not in world.told and 0 < timeout_s <= 20


def test_sigterm_waits_for_a_step_that_changes_weights() -> None:
    world = interrupted("fit 1")
    ((state, _),) = world.saved_last
    assert state[0]["step"] == 2 and world.told[-1] == "record 2", "no evaluation, which takes long"


def test_a_step_that_does_not_end_within_the_grace_saves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = interrupted("fit 1", grace_s=0.05)
    assert not world.saved_last and "record 2" not in world.told
    assert "no checkpoint was saved after SIGTERM" in caplog.text and "ckpt.grace_s" in caplog.text


def test_an_evaluation_that_sigterm_stopped_is_made_by_the_resumed_run() -> None:
    world = interrupted("evaluating 2")
    (((plain, arrays), _),) = world.saved_last
    assert (plain["step"], plain["last_evaluation"]) == (2, 0)
    again = World(eval={"steps": 2, "n_samples_per_prompt": 3})
    again.loop.experience.load_state_dict = lambda state: None
    again.loop.restore(plain, arrays)
    again.loop.run()
    assert again.told[:2] == ["send_weights", "evaluate 2"]


@pytest.mark.parametrize(("how", "ckpt"), [(signal.SIGINT, {}), (signal.SIGTERM, {"grace_s": 0})])
def test_ctrl_c_and_no_grace_save_nothing(how: signal.Signals, ckpt: dict) -> None:
    assert not interrupted("score 1", how, **ckpt).saved_last


def test_the_critic_has_a_head_start_and_trains_first_where_it_shares_gpus() -> None:
    sections = {"algo": {"advantage": {"estimator": "gae"}}, "critic": {"freezing_steps": 0}}
    world = World(with_critic=True, ds={"enable_sleep": True}, eval={"steps": -1}, **sections)
    world.loop.run()
    assert [what for what in world.told if "fit" in what] == [
        "fit critic",
        *["fit critic", "fit"] * 2,
    ]


@pytest.mark.parametrize("partial", [True, False])
def test_a_sync_waits_for_groups_in_flight_unless_rollouts_are_partial(partial: bool) -> None:
    world, drained = World(train={"async_enable": True, "partial_rollout_enable": partial}), []
    world.loop.rollouts.drain = lambda: drained.append(True)
    world.loop.publish()
    assert bool(drained) != partial


def test_evaluation_samples_as_its_own_options_say() -> None:
    world = World(rollout={"top_p": 0.9})
    asked = []
    ask = world.requests.ask
    world.requests.ask = lambda key, request, first: (
        asked.append(request),
        ask(key, request, first),
    )
    options = {"temperature": 0.2, "top_p": 0.7, "max_new_tokens": 3, "remote_url": "own.py"}
    world.loop.held_out = [held_out(samples=2, **options), held_out("b", samples=1)]
    world.loop.evaluate()
    assert {
        (
            each.samples,
            each.sampling.temperature,
            each.sampling.top_p,
            each.sampling.max_new_tokens,
            each.grader,
        )
        for each in asked
    } == {(2, 0.2, 0.7, 3, "own.py"), (1, 0.6, 1.0, 4, None)}


def test_seeds_of_an_evaluation_are_those_of_the_command() -> None:
    """Of train.seed, the prompt's place in the file and the sample, whatever the step."""
    (request, other) = held_out().requests(options(more={"train": {"seed": 7}})).values()
    assert [request.seed_of(1), other.seed_of(0)] == [derived_seed(7, 0, 1), derived_seed(7, 1, 0)]
    assert [prompt.number for prompt in all_prompts(Loader(2), [3, 5])] == [3, 5]


class Streaming(World):
    """The evaluation of step 1 is asked for beside training; the test says when its groups are
    there."""

    def __init__(self) -> None:
        super().__init__(train={"max_staleness": 1}, eval={"steps": 1, "async_enable": True})
        self.counted: list[int] = []
        self.requests.at_once = False
        self.loop.recorder.evaluation = lambda step, logs: self.counted.append(step)
        ask = self.requests.ask

        def asked(key: Any, request: Any, first: bool = False) -> None:
            ask(key, request, first)
            if not isinstance(key, tuple):
                self.requests.finish(key)

        self.requests.ask = asked

    def evaluations(self) -> list[Any]:
        return [key for key in self.requests.waiting if isinstance(key, tuple)]


def test_an_evaluation_beside_training_is_of_one_version_and_no_part_of_a_step() -> None:
    world = Streaming()
    world.loop.checkpointer.after_step = lambda *_: None
    world.loop.step, world.loop._ended = 1, time.perf_counter()
    world.loop.evaluate_and_save()
    assert len(world.evaluations()) == 2 and world.counted == [], "asked for, and training goes on"
    ended = world.loop._ended
    world.requests.finish(*world.evaluations())
    world.loop.step = 2
    measured = world.loop.publish()
    assert world.counted == [1] and world.told[-1] == "send_weights", (
        "recorded with its step, before the weights go"
    )
    assert world.loop._ended == pytest.approx(ended + measured["time/wait_eval"])
    assert "time/wait_eval" not in world.loop.publish()


def test_an_evaluation_of_two_versions_is_an_error_unless_an_engine_was_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for replaced in (False, True):
        world = Streaming()
        world.loop.checkpointer.after_step = lambda *_: None
        world.loop.evaluate_and_save()
        world.requests.version = 1
        world.requests.finish(*world.evaluations())
        world.loop.supervisor.restarts += replaced
        if replaced:
            world.loop.publish()
            assert "is left out: an engine was replaced" in caplog.text and world.counted == []
        else:
            with pytest.raises(
                AssertionError, match=r"is of weights 0, and has tokens of \[0, 1\]"
            ):
                world.loop.publish()


def test_the_algorithm_gets_the_initial_entropy_and_a_resumed_run_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advantage = {"estimator": "gtpo_conflict", "is_correction_level": "token"}
    own = {"gamma": 0.3, "initial_entropy_prompts": 7}
    taken, world = [], World(algo={"advantage": advantage, "gtpo_conflict": own})
    world.loop.prompts = SimpleNamespace(first=lambda count: taken.append(count) or Loader(2))
    monkeypatch.setattr(data, "dataloader", lambda prompts: prompts)
    job.set_initial_entropy(world.loop)
    algorithm = world.loop.experience.algorithm
    # completions are the tokens 1 (length of the prompt's text) and 4
    assert algorithm.options.h_ini == world.loop.initial_entropy == pytest.approx((0.1 + 0.4) / 2)
    assert algorithm.options.gamma == 0.3 and algorithm.correction.level == "token" and taken == [7]
    assert world.told == [(0, {"algorithm/initial_entropy": world.loop.initial_entropy})]

    world.loop.initial_entropy = 0.123
    job.set_initial_entropy(world.loop)
    assert world.loop.experience.algorithm.options.h_ini == 0.123 and taken == [7]
    assert "no effect" not in caplog.text

    world.loop.initial_entropy = 0.7  # Qwen's is above ln 2: only_neg would do nothing, silently
    job.set_initial_entropy(world.loop)
    assert (
        "filter has no effect: got all, and h_ini 0.7 is not below ln 2; to filter all the same"
        in caplog.text
    )


# ---- checkpoints


class Maker:
    """Stands in for the experience maker."""

    def __init__(self) -> None:
        self.state: Any = None
        self.scoring = SimpleNamespace(engine_entropies=False)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": 7, "kl": {"value": 0.25}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def unused_parts() -> dict[str, None]:
    return dict.fromkeys(["auxiliary", "prompts", "held_out_data", "steps", "trained", "resumed"])


def half_loop(requests: Requests) -> TrainingLoop:
    """A loop with what its state consists of."""
    stream = PromptStream(Loader(20), episodes=2)
    how = options(max_staleness=1, filter_range=(0.2, 2.0), guide_samples=1)
    unused = (
        *unused_parts(),
        "session",
        "events",
        "policy",
        "supervisor",
        "sharing",
        "gauges",
        "held_out",
        "tokenizer",
        "checkpointer",
        "profiler",
    )
    return TrainingLoop(
        config=how,
        rollouts=Rollouts(stream, requests, how, Deadline()),
        experience=Maker(),
        deadline=Deadline(),
        step=7,
        initial_entropy=0.61,
        judge=StepJudge(how),
        progress=Progress(40, how.rollout.batch_size),
        recorder=SimpleNamespace(last_evaluation=6),
        **dict.fromkeys(unused),
    )


def through_files(folder: Path, state: dict, arrays: dict) -> tuple[dict, dict]:
    write_plain(folder, "controller.json", state)
    save_file(arrays, folder / "groups.safetensors")
    return read_plain(folder / "controller.json"), load_file(folder / "groups.safetensors")


def test_the_driver_continues_where_it_was_and_no_group_is_lost_or_used_twice(
    tmp_path: Path,
) -> None:
    requests = Requests(at_once=True, stuck={2}, score=lambda prompt: float(prompt != "1"))
    loop = half_loop(requests)
    taken = [group.prompt.number for group in loop.rollouts.take(0)]  # 1 is filtered, 2 in flight
    loop.rollouts.take(1)
    requests.finish(*[key for key in requests.waiting if key != 2][:1])
    loop.rollouts.pump()
    state, arrays = through_files(tmp_path, *loop.state())
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))

    again = Requests(at_once=True)
    fresh = half_loop(again)
    fresh.step, fresh.initial_entropy, fresh.recorder.last_evaluation = 0, None, -1
    fresh.restore(state, arrays)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
    assert (fresh.step, fresh.initial_entropy) == (7, 0.61)
    assert fresh.recorder.last_evaluation == 6
    assert fresh.experience.state == {"batches": 7, "kl": {"value": 0.25}}
    assert fresh.rollouts.dropped == {"filtered": 1, "late": 0, "unstarted": 0, "skipped": 0}

    (waiting,) = loop.rollouts.snapshot()[1]
    batch = fresh.rollouts.take(0)
    assert again.asked[0] == 2 and waiting.prompt.number not in again.asked, (
        "asked again: what was in flight, only"
    )
    by_number = {group.prompt.number: group for group in batch}
    assert not by_number.keys() & {*taken, 1}
    restored = by_number[waiting.prompt.number]
    assert restored.prompt == waiting.prompt
    assert [one.from_guide for one in restored.responses] == [False, True]
    for one, other in zip(restored.responses, waiting.responses, strict=True):
        assert np.array_equal(one.tokens_S, other.tokens_S) and np.array_equal(
            one.logprobs_T, other.logprobs_T
        )
        assert (
            one.entropies_T is None
            and one.tokens_S.dtype == np.int32
            and one.logprobs_T.dtype == np.float32
        )
        assert (
            one.actions,
            one.versions,
            one.reward,
            one.score,
            one.truncated,
            one.extra_logs,
        ) == (
            other.actions,
            other.versions,
            other.reward,
            other.score,
            other.truncated,
            other.extra_logs,
        )


def test_groups_that_were_sampled_without_entropies_are_asked_for_again_where_they_are_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = half_loop(Requests(at_once=True))
    loop.rollouts.take(0)
    told, untold = loop.rollouts.snapshot()[1][:2]
    told.responses[:] = [replace(one, entropies_T=np.float32([0.5, 1.5])) for one in told.responses]
    state, arrays = through_files(tmp_path, *loop.state())
    again = Requests(at_once=True)
    fresh = half_loop(again)
    fresh.experience.scoring.engine_entropies = True
    fresh.restore(state, arrays)
    by_number = {group.prompt.number: group for group in fresh.rollouts.take(0)}
    assert "were sampled without entropies, which algo.entropies engine needs" in caplog.text
    assert untold.prompt.number in again.asked and told.prompt.number not in again.asked
    assert [one.entropies_T.tolist() for one in by_number[told.prompt.number].responses] == [
        [0.5, 1.5]
    ] * 2
