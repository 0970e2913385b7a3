"""The leak ledger: what the answers of a run may have told of each label."""
