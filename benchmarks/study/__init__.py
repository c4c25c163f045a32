"""Studies: the same methods on several seeds, with intervals and verdicts (docs/science.md)."""
