"""Attacks on the gradients that cross the wire, and the measure of their success: the leak AUC."""
