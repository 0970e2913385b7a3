"""Two-party split learning that tells the label owner what its gradients give away."""

from importlib.metadata import version

__version__ = version("splitveil")
"""The version of the installed package."""
