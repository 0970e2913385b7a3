"""Reads and checks a party's own file and turns it into tensors for its model."""
