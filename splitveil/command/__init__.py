"""The command ``splitveil``: one name for everything that can be done from a shell."""
