"""Bottom and top models, their optimizers, and taps on their gradients."""
