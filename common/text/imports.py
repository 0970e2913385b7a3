"""Imports what settings name as ``package.module:name``, and knows the faults of such code."""

import importlib
import re
import sys
from pathlib import Path
from traceback import walk_tb

from splitveil.common.errors import SettingsError, SplitveilError

HANDED_OVER = "splitveil.library.handed_over"  # holds code that a program gave as objects

_own_modules: set[str] = set()  # whose code settings name, base classes' modules included
_NOT_OWN = frozenset({"builtins", "splitveil", "torch"})
_SHORT_OF_MEMORY = re.compile(r"CUDA|\bCU[A-Z]+_|\bcu[A-Z]|out of memory|allocate memory")
"""In what torch says where the device or the memory fails, and not the computation."""


def import_named(name: str, kind: str) -> object:
    """Return what the user's own ``package.module:name`` is, a ``kind``, or raise SettingsError."""
    module_name, separator, own_name = name.partition(":")
    if not (separator and module_name and own_name):
        raise SettingsError(f"{name}: expected package.module:{kind.capitalize()}")
    if module_name == HANDED_OVER and not hasattr(sys.modules.get(module_name), own_name):
        raise SettingsError(
            f"{own_name} was given to simulate as an object, which only that process has: put it "
            f"into a module, and name it package.module:{own_name}"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's own module raises while it is imported
        raise SettingsError(
            f"{name}: {module_name} cannot be imported: {first_line(error)}"
        ) from error
    if not hasattr(module, own_name):
        raise SettingsError(f"{name}: {module_name} has no {kind} {own_name}")
    found: object = getattr(module, own_name)
    # Code that was executed without a module has no name for it.
    parts = (getattr(part, "__module__", None) for part in getattr(found, "__mro__", (found,)))
    names = {module_name, *(name for name in parts if name is not None)}
    _own_modules.update(name for name in names if name.partition(".")[0] not in _NOT_OWN)
    return found


def extra_missing(feature: str, extra: str) -> SettingsError:
    """Return the error for a feature whose libraries an extra of the package installs."""
    return SettingsError(
        f"{feature} needs the extra {extra} (pip install 'splitveil[{extra}]'), which is not "
        "installed here"
    )


def may_pass(error: BaseException) -> bool:
    """Return whether the same computation may succeed later: memory, a device or a file failed."""
    if isinstance(error, RuntimeError) and _SHORT_OF_MEMORY.search(str(error)):
        return True
    before = error.__context__
    return isinstance(error, MemoryError | OSError) or (before is not None and may_pass(before))


def fault_in_words(error: BaseException, *, shows_text: bool = True) -> str:
    """Describe an exception and its places in the user's own code; its text may hold labels."""
    text = first_line(error) if shows_text else f"{type(error).__name__} (text not shown)"
    return " at ".join([text, *_places(error)[-5:]])


def fault_of_own_code(error: BaseException, *, shows_text: bool = False) -> SettingsError | None:
    """Return the error for an exception of the user's own code that restarts repeat, or None."""
    is_other = isinstance(error, SplitveilError) or not isinstance(error, Exception)
    if is_other or may_pass(error) or not _places(error):
        return None
    return SettingsError(f"your own code fails: {fault_in_words(error, shows_text=shows_text)}")


def _places(error: BaseException) -> list[str]:
    return [
        f"{Path(frame.f_code.co_filename).name}:{line} ({frame.f_code.co_qualname})"
        for frame, line in walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in _own_modules
    ]


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its text, for messages."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"
