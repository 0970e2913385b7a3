"""The leak monitor: what is measured during a run, and what follows from it."""
