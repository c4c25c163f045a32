"""What a run shows and leaves behind: files of metrics, events and completions, a progress line,
figures."""

from __future__ import annotations

from openrlhf_ext.reporting.lines import (
    EventLog,
    HeldOutWriter,
    MetricsWriter,
    SampleWriter,
    chosen_groups,
    read_metrics,
)
from openrlhf_ext.reporting.names import METRICS, Metric, is_documented
from openrlhf_ext.reporting.progress import (
    ProgressLine,
    RunStatus,
    TerminalHandler,
    duration,
    write_figure,
)

__all__ = [
    "METRICS",
    "EventLog",
    "HeldOutWriter",
    "Metric",
    "MetricsWriter",
    "ProgressLine",
    "RunStatus",
    "SampleWriter",
    "TerminalHandler",
    "chosen_groups",
    "duration",
    "is_documented",
    "read_metrics",
    "write_figure",
]
