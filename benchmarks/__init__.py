"""Measurements: each is a script that prints a short table; docs/performance.md has the results."""
