"""The leak ledger: how much the answers of a run may have revealed about each label."""
