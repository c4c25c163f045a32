"""Accuracy of checkpoints outside a run: benchmarks, sampling, grading, statistics."""
