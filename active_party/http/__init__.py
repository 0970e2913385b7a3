"""Online joint inference at the active party: other programs ask, by HTTP."""
