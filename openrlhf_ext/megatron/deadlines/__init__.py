"""Waits of ranks for each other: who is missing when a collective waits in vain, and waits that are no collectives."""
