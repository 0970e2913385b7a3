"""Joint inference at a passive party: it answers ids with the activations of their rows."""
