"""Imports what settings name as ``package.module:name``."""

import importlib

from splitveil.common.errors import SettingsError


def import_named(name: str, kind: str) -> object:
    """Return what a module of the user's own defines under a name.

    Args:
        name: ``package.module:name``.
        kind: what is expected there, for messages, such as ``class``.

    Raises:
        SettingsError: the module cannot be imported, or does not define the name.
    """
    module_name, separator, own_name = name.partition(":")
    if not (separator and module_name and own_name):
        raise SettingsError(f"{name}: expected package.module:{kind.capitalize()}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's own module raises while it is imported
        raise SettingsError(
            f"{name}: {module_name} cannot be imported: {first_line(error)}"
        ) from error
    if not hasattr(module, own_name):
        raise SettingsError(f"{name}: {module_name} has no {kind} {own_name}")
    found: object = getattr(module, own_name)
    return found


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its text, for messages."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
