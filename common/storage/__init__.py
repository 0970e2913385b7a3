"""A run's folder: checkpoints, the log of answers, and the files of earlier models."""
