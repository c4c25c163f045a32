"""What a supervised run writes down, on its rank 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.upstream import namespace
from openrlhf_ext.reporting import (
    EventLog,
)
from openrlhf_ext.reporting.progress import (
    SUPERVISED,
    SUPERVISED_PANELS,
)
from openrlhf_ext.run.records import Recorder

logger = logging.getLogger(__name__)


class SupervisedRecorder(Recorder):
    """Of a supervised run, on its rank 0."""

    columns, panels = SUPERVISED, SUPERVISED_PANELS

    def __init__(
        self, config: SupervisedConfig, steps: int, resume_step: int, events: EventLog
    ) -> None:
        super().__init__(config, steps, resume_step, events)
        self.every: int = config.logger.logging_steps
        self.sinks: list[Any] = []
        if config.logger.wandb.key or config.logger.tensorboard_dir:
            # late: most runs, and all other ranks, need no OpenRLHF
            from openrlhf_ext.compat import build_sinks

            self.sinks = build_sinks(namespace(config.model_dump()))

    def step(
        self, step: int, metrics: Mapping[str, float], trained: int, tokens: int, seconds: float
    ) -> None:
        """One optimizer step: ``trained`` of ``tokens`` tokens were trained on."""
        self.events.step = step
        record = self.write(
            step,
            {
                **{
                    "loss/sft" if name == "loss/policy" else name: value
                    for name, value in metrics.items()
                },
                "tokens/trained": trained,
                "throughput/train_tokens_per_second": tokens / seconds,
                "time/train": seconds,
                "time/step": seconds,
            },
        )
        if step % self.every == 0:
            for sink in self.sinks:
                sink.log_train(step, record)

    def evaluation(self, step: int, loss: float, known: float, seconds: float) -> None:
        logs = {"eval/loss": loss, "eval/known": known, "time/eval": seconds}
        self.watch(step, self.writer.write(step, logs))
        for sink in self.sinks:
            sink.log_eval(step, logs)
        logger.info("step %d: held-out loss %.4f%s", step, loss, self.said_label)

    def close(self) -> None:
        super().close()
        for sink in self.sinks:
            sink.close()
