"""Two-party split learning that tells the label owner what its gradients give away."""

from splitveil.common.text.version import VERSION

__version__ = VERSION
"""The version of the installed package."""
