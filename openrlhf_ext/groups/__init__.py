"""Processes that work together: how they meet, wait for each other, and end together."""
