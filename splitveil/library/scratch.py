"""A folder that is deleted when nothing refers to it any longer, at the latest when Python ends."""

import shutil
import tempfile
import weakref
from pathlib import Path


class Scratch:
    """A new folder, for its owner alone."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="splitveil-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
