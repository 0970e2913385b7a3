"""The record of a run: its figures on disk, on a terminal, and in the tables at its end."""
