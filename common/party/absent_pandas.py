"""Lets pyarrow work without pandas until a program asks for it.

Where pandas is installed, pyarrow imports it with the first array that it makes, to recognise
columns of data frames: a fifth of a second of CPU time and some 40 MiB of memory, in a party that
has no data frames. pyarrow looks for it once; where it found none, it looks again only when a data
frame is asked for. A model, defense or attack of the user's own may still use both.
"""

import sys
from importlib.abc import MetaPathFinder

import pyarrow as pa

_PANDAS = "pandas"

WITHOUT_TABLES = frozenset({"report", "verify-transcript"})
"""Commands of a party that make no array of pyarrow."""


def leave_pandas_out(command: str) -> None:
    """Let pyarrow find no pandas, this time; nothing happens if it has been imported.

    Call it before other threads run.

    Args:
        command: of the party that is about to do its work.
    """
    if _PANDAS in sys.modules or command in WITHOUT_TABLES:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == _PANDAS:
            raise ModuleNotFoundError(f"no module named {name!r} for now", name=name)
