"""Names for classes and functions that a program hands over instead of naming them.

Settings name a defense or an attack of one's own as ``package.module:name``. What a notebook or a
closure defines has no such name, so it gets one here, which only this process knows.
"""

import itertools
import re
import sys
from collections.abc import Callable
from types import ModuleType

_HANDED_OVER = "splitveil.library.handed_over"


def name_of(thing: Callable[..., object]) -> str:
    """Return ``package.module:name``, under which an import finds a class or a function.

    Another one of the same name gets a name of its own.
    """
    module, name = thing.__module__, getattr(thing, "__qualname__", "")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is thing:
        return f"{module}:{name}"
    plain = re.sub(r"\W", "_", getattr(thing, "__name__", "")).strip("_") or "unnamed"
    home = sys.modules.setdefault(_HANDED_OVER, ModuleType(_HANDED_OVER))
    names = itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count(2)))
    free = next(one for one in names if getattr(home, one, thing) is thing)
    setattr(home, free, thing)
    return f"{_HANDED_OVER}:{free}"
