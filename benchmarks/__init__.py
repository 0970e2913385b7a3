"""Measurements: one question per file, each printing the machine, the versions and the spread."""
