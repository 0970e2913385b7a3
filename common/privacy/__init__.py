"""Attacks on the gradients that cross the wire, and what they find out: the leak AUC."""
