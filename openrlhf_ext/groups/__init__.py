"""Groups of processes: how they connect, wait for each other, and end together."""
