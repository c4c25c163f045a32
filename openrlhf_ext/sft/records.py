"""What rank 0 of a supervised run writes down: metrics.jsonl, events.jsonl, a line of progress, the figure."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.show import shown_options
from openrlhf_ext.config.upstream import namespace
from openrlhf_ext.options import required
from openrlhf_ext.patches.environment import machine
from openrlhf_ext.reporting import EventLog, MetricsWriter, ProgressLine, write_figure
from openrlhf_ext.reporting.progress import SUPERVISED, SUPERVISED_PANELS

logger = logging.getLogger(__name__)

_FIGURE_EVERY_S = 30.0


class Records:
    """Of one run of ``steps`` steps, which goes on after ``resume_step``. Not a collective."""

    def __init__(self, config: SupervisedConfig, steps: int, resume_step: int) -> None:
        self.config, self.label = config, config.training_label
        self.metrics_path = Path(required(config.logger.metrics_path, "logger.metrics_path"))
        self.writer = MetricsWriter(self.metrics_path, resume_step, label=self.label)
        self.events = EventLog(self.metrics_path.with_name("events.jsonl"), goes_on=resume_step > 0)
        self.events.note("start", **self._about(), resume_step=resume_step)
        self.events.repeat_from(resume_step)
        self.events.note("ready", steps=steps, processes={})
        self.progress = ProgressLine(steps, label=self.label, columns=SUPERVISED)
        self.sinks = self._sinks()
        self._drawn_at = time.monotonic()

    def _about(self) -> dict:
        layout = self.config.layout
        return {
            "options": shown_options(self.config),
            "set": sorted(self.config.sources),
            **machine(),
            "layout": {
                "ranks": layout.world_size, "tensor": layout.tensor_parallel_size,
                "pipeline": layout.pipeline_parallel_size, "context": layout.context_parallel_size,
                "data": layout.data_parallel_size,
            },
        }  # fmt: skip

    def _sinks(self) -> list:
        """OpenRLHF's loggers that the options ask for."""
        if not (self.config.logger.wandb.key or self.config.logger.tensorboard_dir):
            return []
        from openrlhf_ext.compat import build_sinks  # late: other ranks, and runs without loggers, need no OpenRLHF

        return build_sinks(namespace(self.config.model_dump()))

    def step(self, step: int, metrics: Mapping[str, float], trained: int, tokens: int, seconds: float) -> None:
        """One optimizer step: ``trained`` of ``tokens`` tokens were trained on."""
        self.events.step = step
        renamed = {"loss/sft" if name == "loss/policy" else name: value for name, value in metrics.items()}
        record = self.writer.write(step, {
            **renamed, "tokens/trained": trained, "throughput/train_tokens_per_second": tokens / seconds,
            "time/train": seconds, "time/step": seconds,
        })  # fmt: skip
        self.progress.show(step, record)
        if step % self.config.logger.logging_steps == 0:
            for sink in self.sinks:
                sink.log_train(step, record)
        if time.monotonic() - self._drawn_at > _FIGURE_EVERY_S:
            self._draw()

    def evaluation(self, step: int, loss: float, seconds: float) -> None:
        logs = {"eval/loss": loss, "time/eval": seconds}
        self.writer.write(step, logs)
        for sink in self.sinks:
            sink.log_eval(step, logs)
        logger.info("step %d: held-out loss %.4f%s", step, loss, f", {self.label}" if self.label else "")

    def saved(self, step: int, ends: bool) -> None:
        self.events.note("checkpoint", of_step=step, path=self.config.ckpt.path)
        if ends:
            self.events.note("interrupted", signal="SIGTERM", checkpoint=self.config.ckpt.path)
            logger.error("SIGTERM: to go on from step %d: the same command with --ckpt.load_enable", step)

    def finished(self, path: str) -> None:
        self.events.note("end", path=path, results={})
        logger.info("the final checkpoint is in %s; openrlhf-ext report %s", path, self.metrics_path.parent)

    def failed(self, error: Exception) -> None:
        self.events.note("failure", error=str(error), traceback="".join(traceback.format_exception(error)))

    def close(self) -> None:
        self._draw()
        self.writer.close()
        self.events.close()
        for sink in self.sinks:
            sink.close()

    def _draw(self) -> None:
        """A picture of what metrics.jsonl has is no reason to end a run."""
        self._drawn_at = time.monotonic()
        try:
            write_figure(self.metrics_path, str(self.config.logger.figure_path), self.label, SUPERVISED_PANELS)
        except OSError as error:
            logger.error("the figure %s could not be drawn: %s", self.config.logger.figure_path, error)
