"""What a run shows and leaves behind: metrics.jsonl, one line of progress per step, figures."""

from __future__ import annotations

from openrlhf_ext.reporting.figure import write_figure
from openrlhf_ext.reporting.metrics import MetricsWriter, read_metrics
from openrlhf_ext.reporting.names import METRICS, Metric, is_documented
from openrlhf_ext.reporting.progress import ProgressLine

__all__ = ["METRICS", "Metric", "MetricsWriter", "ProgressLine", "is_documented", "read_metrics", "write_figure"]
