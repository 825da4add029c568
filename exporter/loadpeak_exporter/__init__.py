"""Reads records of runs and shows them: metrics, commands, comparison, replay.

The record on disk is the only interface to the recorder: what is shown of a live engine is what could
still be read after it was killed.
"""
