"""What a party tells its own operators while it runs: health, readiness and metrics over HTTP."""
