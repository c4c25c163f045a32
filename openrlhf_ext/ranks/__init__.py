"""What runs in a training process: one Ray actor per rank."""
