"""Matched startups: planned, run in alternation, judged by a gate, reported."""
