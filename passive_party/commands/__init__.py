"""What each command of ``passive-party`` does."""
