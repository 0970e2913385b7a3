"""The commands of ``passive-party``."""
