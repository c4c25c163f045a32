"""One rank of a supervised run: read, train, evaluate, save. Every function is a collective over
all ranks of the model unless it says otherwise.

Shape suffixes as in ``megatron.step.batch``.
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoTokenizer

from openrlhf_ext.checkpoints import CheckpointError
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.groups.watchdog import phase, start_watchdog, wait_for_all
from openrlhf_ext.megatron.distributed import initialize_distributed
from openrlhf_ext.megatron.model.hf_files import end_tokens, saved_generation_config
from openrlhf_ext.megatron.model.positions import chosen_factors
from openrlhf_ext.megatron.model.shape import read_model_shape
from openrlhf_ext.megatron.policy import MegatronPolicy
from openrlhf_ext.megatron.settings import ModelSettings, layer_converters, row_costs
from openrlhf_ext.megatron.step.batch import LogprobEntropy, SequenceBatch
from openrlhf_ext.megatron.step.dealing import deal_rows
from openrlhf_ext.megatron.step.schedule import sum_over_replicas
from openrlhf_ext.options import required
from openrlhf_ext.options.sections import Rollout, Train
from openrlhf_ext.ranks.movement import Moved, Movement, check_gauges, movement_gauges
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.run.checkpoints import (
    Arrays,
    Checkpointer,
    State,
    check_shared_folders,
    restore,
    write_hf,
)
from openrlhf_ext.run.ending import listened, note_end, report_interruption
from openrlhf_ext.run.records import about
from openrlhf_ext.sft.checkpoints import Ranks
from openrlhf_ext.sft.data import fingerprint, load_examples, read_examples, save_examples
from openrlhf_ext.sft.gauges import ExampleGauges, known_fraction
from openrlhf_ext.sft.loss import Answers, SupervisedLoss
from openrlhf_ext.sft.recorder import SupervisedRecorder

logger = logging.getLogger(__name__)


def run_rank(config: SupervisedConfig) -> int:
    """Trains until the examples are used up, on every rank. Returns 0; 143 after SIGTERM, 129 after
    SIGHUP, when a checkpoint was written; 130 after Ctrl-C."""
    timeout_s = config.megatron.collective_timeout_s
    initialize_distributed(config.layout, timeout_s, config.train.seed)
    start_watchdog(timeout_s)
    with ExitStack() as stack:
        received = stack.enter_context(_signals())
        path = config.logger.beside("events.jsonl")
        events = stack.enter_context(
            EventLog(path if dist.get_rank() == 0 else None, config.ckpt.load_enable)
        )
        events.note("start", **about(config))
        try:
            ranks = Ranks()
            ranks.led(lambda: check_shared_folders(config, ranks.call, timeout_s))
            with phase("reading the examples"):
                examples, held_out = _shared_examples(config, ranks)
            return Supervised(config, ranks, examples, held_out, events, received).run()
        except BaseException as error:
            if signal.SIGINT in received:  # whatever the end of other ranks has made of it here
                return report_interruption(config, events, signal.SIGINT)
            note_end(
                events,
                "failure",
                error=str(error),
                traceback="".join(traceback.format_exception(error)),
            )
            raise


@contextmanager
def _signals() -> Iterator[list[int]]:
    """In the body the first signal that ends a run is noted in the list, so that the step under way
    ends first; Ctrl-C also raises KeyboardInterrupt. Those that follow are ignored, also by the
    process that ends then: a terminal's Ctrl-C comes twice, the second time from the launcher."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if not received:
            received.append(number)
            if number == signal.SIGINT:
                raise KeyboardInterrupt

    before = {number: signal.signal(number, receive) for number in listened()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if received else handler)


def _shared_examples(
    config: SupervisedConfig, ranks: Ranks
) -> tuple[SequenceBatch, SequenceBatch | None]:
    """Rank 0 tokenizes; the others map what it wrote, on storage that all nodes share."""
    if dist.get_world_size() == 1:
        return read_examples(config)
    folder = Path(config.ckpt.output_dir) / ".examples"

    def read() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for name, examples in zip(("train", "held_out"), read_examples(config), strict=True):
            if examples is not None:
                save_examples(folder, name, examples)

    ranks.led(read)
    train, held_out = load_examples(folder, "train"), load_examples(folder, "held_out")
    wait_for_all()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)  # what is mapped stays readable
    if train is None:
        raise CheckpointError(f"rank {dist.get_rank()} does not see what rank 0 wrote to {folder}")
    return train, held_out


def settings(config: SupervisedConfig, updates: int) -> ModelSettings:
    """What the rank builds, at temperature 1."""
    path = required(config.model_path, "model.model_name_or_path")
    rollout = Rollout(micro_batch_size=config.train.micro_batch_size)
    return ModelSettings(
        path,
        config.layout,
        config.megatron,
        rollout,
        Train(**dict(config.train)),
        layer_converters(config, read_model_shape(path).family),
        config,
        updates,
        aux_loss_coef=config.model.aux_loss_coef,
        max_len=config.data.max_len,
        chat_template=config.data.tokenizer_chat_template,
        adam_offload=config.ds.optimizer_on_host,
    )


class Supervised:
    """A run; ``received`` holds the signal that ends it, once it came."""

    def __init__(
        self,
        config: SupervisedConfig,
        ranks: Ranks,
        examples: SequenceBatch,
        held_out: SequenceBatch | None,
        events: EventLog,
        received: list[int],
    ) -> None:
        self.config, self.ranks, self.examples, self.held_out = config, ranks, examples, held_out
        self.events, self.received, self.last_evaluation = events, received, -1
        self.per_epoch = math.ceil(len(examples) / config.train.batch_size)
        self.steps = self.per_epoch * config.train.max_epochs
        with phase("building the model"):
            self.policy = ranks.policy = MegatronPolicy(settings(config, self.steps))
            self.movement = Movement(self.policy)
        if factors := chosen_factors(self.policy.shape.rotary, config.data.max_len):
            logger.info(factors)
        groups, data = {"model": ranks.call}, {"examples": fingerprint(examples)}
        self.timeout_s = timeout_s = config.megatron.collective_timeout_s
        with phase("loading the checkpoint"):
            resumed = ranks.led(lambda: restore(config, groups, data, timeout_s, events))
        self.step = 0 if resumed is None else resumed.step
        first = dist.get_rank() == 0
        self.recorder = SupervisedRecorder(config, self.steps, self.step, events) if first else None
        self.gauges = (
            self._example_gauges({} if resumed is None else resumed.arrays) if first else None
        )
        self.checkpointer = Checkpointer(config, groups, data, timeout_s, events)
        events.note("ready", steps=self.steps, processes={})

    def _example_gauges(self, arrays: Arrays) -> ExampleGauges:
        self.known = 0.0 if self.held_out is None else known_fraction(self.held_out, self.examples)
        path = Path(required(self.config.model_path, "model.model_name_or_path"))
        fast = not self.config.data.disable_fast_tokenizer
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, use_fast=fast)
        ends = end_tokens(saved_generation_config(path), tokenizer)
        return ExampleGauges(self.examples, self.per_epoch, ends, arrays.get("trained"))

    def run(self) -> int:
        """As ``run_rank``."""
        try:
            if self.step == 0:
                self._evaluate()
            while self.step < self.steps:
                self._train_step()
                if self._due(self.config.eval.steps, self.per_epoch):
                    self._evaluate()
                if number := self._someone_was_told_to_end():
                    return self._save_and_end(number)
                if self._due(self.config.ckpt.save_steps, None):
                    with phase("saving a checkpoint"):
                        self.ranks.led(lambda: self.checkpointer.save(self.step, *self._state))
            if self.last_evaluation != self.step:
                self._evaluate()
            self._finish()
            return 0
        finally:
            if self.recorder is not None:
                self.recorder.close()

    def _due(self, every: int, otherwise: int | None) -> bool:
        """Whether something is due after this step; ``otherwise``: how often without a number of
        steps."""
        interval = otherwise if every == -1 else every
        return interval is not None and self.step % interval == 0

    def _train_step(self) -> None:
        started = time.perf_counter()
        with phase(f"training step {self.step + 1}"):
            rows = self._rows(self.step)
            tokens = max(1, int(self.examples.counts_B[torch.tensor(rows)].sum()))
            batch = self.examples.select(self._own(self.examples, rows))
            metrics = self._update(batch, tokens)
        if self.gauges is not None:
            metrics |= self.gauges.step(self.step, rows)
        self.step += 1
        if self.recorder is not None:
            total, seconds = (
                int(self.examples.lengths_B[torch.tensor(rows)].sum()),
                time.perf_counter() - started,
            )
            check_gauges(self.step, metrics, self.config)
            self.recorder.step(self.step, metrics, tokens, total, seconds)

    def _update(self, batch: SequenceBatch, tokens: int) -> dict[str, float]:
        """One optimizer step; its loss is computed once more, from the log-probs alone."""
        seen: list[LogprobEntropy] = []
        self.movement.begin()
        metrics = self.policy.train_step(
            batch, Answers(batch.responses, tokens), SupervisedLoss(), seen=seen
        )
        self.movement.end()
        moved: list[Moved | None] = [None] * dist.get_world_size()
        dist.all_gather_object(moved, self.movement.take())
        recounted = self._mean_loss(torch.cat([each.logprobs_N for each in seen]), tokens)
        mismatch = {"mismatch/loss": abs(metrics["loss/policy"] - recounted)}
        return metrics | mismatch | movement_gauges([each for each in moved if each is not None])

    def _mean_loss(self, logprobs_N: torch.Tensor, tokens: int) -> float:
        """Over the shares of all data-parallel ranks, of so many tokens."""
        return (
            -float(sum_over_replicas(logprobs_N.sum(dtype=torch.float64), self.policy.device))
            / tokens
        )

    def _rows(self, step: int) -> list[int]:
        """The examples of a step: every pass has an order of its own, which depends on the seed
        alone."""
        epoch, number = divmod(step, self.per_epoch)
        generator = torch.Generator().manual_seed(self.config.train.seed + epoch)
        order = torch.randperm(len(self.examples), generator=generator)
        size = self.config.train.batch_size
        return order[number * size : (number + 1) * size].tolist()

    def _own(self, of: SequenceBatch, rows: list[int]) -> list[int]:
        """Those of this data-parallel rank, about as much work for each. Not a collective."""
        replicas, replica = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
        )
        costs = row_costs(self.policy.shape, self.config.megatron, self.config.layout)
        return [rows[place] for place in deal_rows(of.select(rows), replicas, costs)[replica]]

    def _evaluate(self) -> None:
        """The mean loss over all trained tokens of the held-out examples."""
        self.last_evaluation = self.step
        if self.held_out is None:
            return
        started = time.perf_counter()
        with phase("evaluating"):
            own = self.held_out.select(self._own(self.held_out, list(range(len(self.held_out)))))
            loss = self._mean_loss(
                self.policy.logprobs(own).logprobs_N, int(self.held_out.counts_B.sum())
            )
        if self.recorder is not None:
            self.recorder.evaluation(self.step, loss, self.known, time.perf_counter() - started)

    def _someone_was_told_to_end(self) -> int:
        """The signal that any rank has got, 0 = none: all of them end after the same step."""
        seen = torch.tensor(max(self.received, default=0), device=self.policy.device)
        with phase("asking all ranks for signals"):
            dist.all_reduce(seen, dist.ReduceOp.MAX)
            return int(seen)

    @property
    def _state(self) -> State:
        """Of rank 0."""
        return {"step": self.step}, {} if self.gauges is None else {"trained": self.gauges.trained}

    def _save_and_end(self, number: int) -> int:
        with phase("saving a checkpoint"):
            self.ranks.led(
                lambda: self.checkpointer.save_before_the_end(self._state, self.timeout_s)
            )
        return report_interruption(self.config, self.events, number)

    def _finish(self) -> None:
        path, folder = (
            self.config.ckpt.output_dir,
            Path(str(self.config.logger.metrics_path)).parent,
        )
        with phase("writing the final checkpoint"):
            self.ranks.led(
                lambda: write_hf(self.ranks.call, "policy", path, "ckpt.output_dir", self.timeout_s)
            )
        self.events.note("end", path=path, results={})
        logger.info("the final checkpoint is in %s; openrlhf-ext report %s", path, folder)
