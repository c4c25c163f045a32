"""Proofs before a run: a layout without its GPUs (``layout_proof``), a checkpoint in and out (``conversion_check``).

Importing this package imports nothing heavy: the processes of a check have to apply their patches first.
"""
