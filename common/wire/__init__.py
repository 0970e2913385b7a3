"""The messages on the wire: their encoding, their limits, and the checks before any is believed."""
