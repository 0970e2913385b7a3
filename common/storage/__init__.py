"""The files of a run's folder: checkpoints, the log of answers, saved models."""
