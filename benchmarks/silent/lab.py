"""Many short runs on one set of Ray actors: each begins with the same weights, a fault may be put
into one of them.

A trial is a run of ``STEPS`` steps of its own seed, which shuffles the prompts and draws the
completions. Before step
``FAULTY_FROM`` + 1 a fault is put into the processes where it lives: functions are replaced in
them, as a bug in the code would have it. Afterwards it is taken out again, ranks load the first
weights and states, and the engine gets them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from openrlhf_ext.config import RunConfig, load_config
from openrlhf_ext.driver import job, processes, settings
from openrlhf_ext.driver.cluster import RaySession
from openrlhf_ext.driver.loop import TrainingLoop
from openrlhf_ext.ranks.policy import PolicyActor
from openrlhf_ext.reporting import EventLog, read_metrics
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.rollout import launch
from openrlhf_ext.rollout.engine import RolloutEngine
from openrlhf_ext.run.checkpoints import restore

STEPS, FAULTY_FROM, SAMPLES = 8, 3, 8
ROOT = Path(__file__).parents[2]

Patches = Callable[[Any], list[Any]]
"""Gets the actor that it is called in (the loop, in the driver); returns context managers, which
are entered."""


class _Spoiled:
    """A process into which a fault can be put."""

    _fault = contextlib.ExitStack()

    def spoil(self, patches: Patches) -> None:
        self._fault = contextlib.ExitStack()
        for each in patches(self):
            self._fault.enter_context(each)

    def heal(self) -> None:
        self._fault.close()


class SpoiledRank(_Spoiled, PolicyActor):
    """Of the policy."""


class SpoiledEngine(_Spoiled, RolloutEngine):
    """Of rollouts."""


@dataclass(frozen=True)
class Fault:
    """A published bug: ``issue`` is where, ``what`` it does. ``at`` is the process that it lives
    in: rank, engine, or driver; of the lab ``sft`` data, which has it from the first step on, or
    rank. ``resumes``: it happens when a run goes on from a checkpoint."""

    name: str
    issue: str
    what: str
    at: str
    patches: Patches
    lab: str = "full"
    resumes: bool = False


@dataclass
class Outcome:
    """Of a trial: its records, the events that told of something, and the error that ended it."""

    seed: int
    records: list[dict[str, Any]]
    events: list[dict[str, Any]]
    error: str | None
    seconds: float


OPTIONS: dict[str, object] = {
    "actor.num_gpus_per_node": 2,
    "actor.adam.lr": 3e-4,
    "actor.lr_scheduler": "constant_with_warmup",
    "actor.lr_warmup_steps": 3,
    "megatron.param_dtype": "fp32",
    "vllm.num_engines": 1,
    "vllm.kv_cache_mib": 128,
    "vllm.enable_prefix_caching": "true",
    "algo.advantage.estimator": "grpo",
    "algo.kl.init_coef": 0.01,
    "algo.kl.use_loss": "true",
    "algo.kl.estimator": "k3",
    "rollout.batch_size": 16,
    "rollout.n_samples_per_prompt": SAMPLES,
    "rollout.temperature": 0.9,
    "rollout.max_new_tokens": 48,
    "rollout.micro_batch_size": 32,
    "train.batch_size": 16 * SAMPLES,
    "train.micro_batch_size": 16,
    "train.full_determinism_enable": "true",
    "data.input_key": "question",
    "data.label_key": "answer",
    "data.max_len": 96,
    "eval.steps": -1,
    "ckpt.save_steps": -1,
    "algo.old_logprobs": "policy",
}
LABS: dict[str, dict[str, object]] = {
    "full": {},
    "tensor": {"megatron.tensor_parallel_size": 2},
    "lora": {"ds.lora.rank": 8, "ds.lora.alpha": 16, "actor.adam.lr": 3e-3},
}
"""More options, by the name of the lab."""


class Lab:
    """Engine and ranks of runs whose options differ in what the driver alone reads: seed, folders,
    corridor."""

    def __init__(self, name: str, folder: Path, toy: Path) -> None:
        self.name, self.folder, self.toy = name, folder, toy

    def config(self, seed: int, out: Path, **more: object) -> RunConfig:
        options = (
            OPTIONS
            | LABS[self.name]
            | {
                "actor.model_name_or_path": self.toy / "warm_start",
                "data.prompt_dataset": self.toy / "data/train.jsonl",
                "reward.remote_url": ROOT / "examples/python/reward_arithmetic.py",
                "train.seed": seed,
                "ckpt.output_dir": out / "policy",
                "ckpt.path": out / "ckpt",
                "logger.metrics_path": out / "metrics.jsonl",
            }
            | {name.replace("__", "."): value for name, value in more.items()}
        )
        return load_config(
            [word for name, value in options.items() for word in (f"--{name}", str(value))]
        )

    @contextlib.contextmanager
    def opened(self) -> Iterator[Lab]:
        """Starts everything once; the first weights and states are kept."""
        processes.PolicyActor, launch.RolloutEngine = SpoiledRank, SpoiledEngine  # type: ignore[misc]
        base = self.config(1, self.folder / "base")
        ranks = base.training_ranks
        with RaySession(
            policy_ranks=ranks, engines=1, env=settings.worker_env(base), verbose=False
        ) as session:
            self.parts = job.build_parts(base, session, EventLog())
            self.ranks = job.callers(self.parts.trained)["policy"]
            self.first = self.folder / "first"
            shutil.rmtree(self.first, ignore_errors=True)
            self.first.mkdir(parents=True)
            self.ranks("save_state", 60.0, folder=str(self.first), name="policy", background=False)
            yield self

    def loop(self, config: RunConfig, resumed: Any, events: EventLog) -> TrainingLoop:
        parts = dataclasses.replace(self.parts, config=config, resumed=resumed, events=events)
        parts.supervisor._events = events
        return job.build_loop(parts)

    def trial(
        self, seed: int, fault: Fault | None = None, steps: int = STEPS, **more: object
    ) -> Outcome:
        """A run with or without a fault; what it was built of is as before when it returns."""
        out, began, error = self.folder / "trial", time.monotonic(), None
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        config = self.config(seed, out, **more)
        with EventLog(out / "events.jsonl") as at:
            self.ranks("load_state", 60.0, folder=str(self.first), name="policy")
            loop = self.loop(config, None, at)
            loop.publish()
            self._driver = contextlib.ExitStack()
            try:
                self._run(loop, FAULTY_FROM)
                loop = self._go_on(loop, config, fault, at)
                self._run(loop, steps)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            finally:
                self._heal(fault)
                loop.close_logs()
        records = [
            record for record in read_metrics(out / "metrics.jsonl") if "reward/mean" in record
        ]
        told = [record for _, record in read_lines(out / "events.jsonl")]
        return Outcome(seed, records, told, error, time.monotonic() - began)

    def _run(self, loop: TrainingLoop, steps: int) -> None:
        """The loop of ``TrainingLoop.run`` until so many steps are done."""
        take = loop.take
        loop.take = lambda: take() if loop.step < steps else []  # type: ignore[method-assign]
        loop.run()
        loop.take = take  # type: ignore[method-assign]

    def _go_on(
        self, loop: TrainingLoop, config: RunConfig, fault: Fault | None, at: EventLog
    ) -> TrainingLoop:
        if fault is None or not fault.resumes:
            self._spoil(loop, fault)
            return loop
        loop.checkpointer.save(loop.step, *loop.state())  # type: ignore[union-attr]
        loop.close_logs()
        self._spoil(loop, fault)
        again = self.config(
            config.train.seed, Path(config.ckpt.path).parent, ckpt__load_enable="true"
        )
        resumed = restore(again, job.callers(self.parts.trained), {}, 60.0, at)
        return self.loop(again, resumed, at)

    def _spoil(self, loop: TrainingLoop, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.at == "rank":
            self.ranks("spoil", 60.0, patches=fault.patches)
        elif fault.at == "engine":
            ray.get(
                [engine.spoil.remote(fault.patches) for engine in self.parts.supervisor.engines],
                timeout=60,
            )
        else:
            for each in fault.patches(loop):
                self._driver.enter_context(each)

    def _heal(self, fault: Fault | None) -> None:
        self._driver.close()
        if fault is not None and fault.at == "rank":
            self.ranks("heal", 60.0)
        if fault is not None and fault.at == "engine":
            ray.get([engine.heal.remote() for engine in self.parts.supervisor.engines], timeout=60)
