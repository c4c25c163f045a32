"""Faults from outside of a run, drawn from a seed, and what a run makes of them
(docs/faults.md)."""
