"""The active party's half of the network: what it computes, and what is computed of it."""
