"""What `splitveil` offers to a notebook or a program: its parts are imported from `splitveil`."""
