"""What both parties use, and nothing that only one of them does."""
