"""The files of a run: models, checkpoints, answers, figures, and the tables at its end."""
