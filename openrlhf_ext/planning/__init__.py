"""Which layouts of a run fit on its GPUs, and how long a step takes: pure arithmetic."""
