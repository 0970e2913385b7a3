"""The leak ledger: how much the answers of a run may have told about each label."""
