"""What fits, and proofs before a run; imports nothing heavy: the processes of a check apply their
patches first."""
