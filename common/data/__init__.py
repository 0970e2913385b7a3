"""Data readers: a party's own file, checked, and as tensors for its model."""
