"""Training of the active party's half of the network, and the evaluation of its predictions."""
