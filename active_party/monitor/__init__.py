"""The leak monitor: it measures the leak during a run, and acts on the results."""
