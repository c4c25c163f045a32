"""What runs with and without a driver share: their folders, checkpoints and records."""
