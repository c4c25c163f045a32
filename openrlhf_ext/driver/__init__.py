"""What runs in the driver's process: the training loop, and the groups of completions that stream
into it."""
