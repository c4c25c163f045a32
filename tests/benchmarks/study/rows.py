"""Rows as runs leave them, made of numbers."""

from __future__ import annotations

from typing import Any

from benchmarks.study.settings import Study

STEPS = 4


def row(
    cell: str, seed: int, level: float, rate: float | None = None, **curves: list[float]
) -> dict[str, Any]:
    """A run whose accuracy was the same at every step."""
    steps: dict[str, list[float]] = {
        "accuracy": [level] * STEPS,
        "short": [0.9] * STEPS,
        "entropy": [0.2] * STEPS,
        "length": [9.0] * STEPS,
        "ended": [1.0] * STEPS,
        "tags": [1.0] * STEPS,
        "shaping_s": [0.1] * STEPS,
        "step_s": [1.0] * STEPS,
        "clip_fraction": [0.0] * STEPS,
    } | curves
    evaluation = {
        "accuracy": level,
        "greedy_accuracy": level,
        "pass@8": level,
        "entropy": 0.2,
        "short": 0.9,
        "tags": 1.0,
        "ended": 1.0,
    }
    return {
        "key": f"{cell}{seed}{rate}",
        "cell": cell,
        "learning_rate": rate,
        "seed": seed,
        "seconds": 10.0,
        "commit": "abc",
        "hardware": "two cores",
        "weights": f"policy {seed}",
        "steps": steps,
        "evaluations": [{"step": 0, **evaluation}, {"step": STEPS, **evaluation}],
    }


def study(
    contrasts: dict[str, dict[str, Any]], seeds: int = 8, gates: list[dict[str, Any]] | None = None
) -> Study:
    """Cells a and b on one task, c and d on it with two learning rates."""
    rates = {"learning_rates": [1e-4, 1e-3]}
    return Study.model_validate(
        {
            "tasks": {
                "t": {"maker": "make.py", "steps": STEPS, "seeds": seeds, "gates": gates or []}
            },
            "cells": {
                "a": {"task": "t"},
                "b": {"task": "t"},
                "c": {"task": "t", **rates},
                "d": {"task": "t", **rates},
            },
            "contrasts": {
                name: {
                    "cells": ["a", "b"],
                    "outcome": "mean_accuracy",
                    "margin": 0.05,
                    "claim": "better",
                    **given,
                }
                for name, given in contrasts.items()
            },
        }
    )
