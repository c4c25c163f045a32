"""Accuracy of checkpoints outside a run: sampling with plain transformers, grading, statistics."""

from __future__ import annotations

from openrlhf_ext.tools.evaluate.accuracy import (
    clustered_standard_error,
    difference_in_errors,
    majority_at_k,
    mean,
    pass_at_k,
)
from openrlhf_ext.tools.evaluate.checkpoint import (
    EvaluationOptions,
    EvaluationResult,
    SampleAnswer,
    evaluate_checkpoint,
    evaluate_model,
)
from openrlhf_ext.tools.evaluate.problems import Problem, load_problems
from openrlhf_ext.tools.evaluate.sampling import Completion, sample_completions

__all__ = [
    "Completion", "EvaluationOptions", "EvaluationResult", "Problem", "SampleAnswer",
    "clustered_standard_error", "difference_in_errors", "evaluate_checkpoint", "evaluate_model", "load_problems",
    "majority_at_k", "mean", "pass_at_k", "sample_completions",
]  # fmt: skip
