"""Bottom and top models, and their optimizers."""
