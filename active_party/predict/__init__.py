"""Joint inference at the active party: activations of passive parties become probabilities."""
