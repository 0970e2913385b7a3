"""The rules of one run, as the active party holds them."""
