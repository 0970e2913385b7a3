"""How messages look on the wire, and what of them is believed."""
