"""Proofs before a run: of layouts and of conversions; configurations of other projects."""
