"""Sorts tags, and looks them up.

NumPy sorts and finds numbers several times as fast as bytes. Tags are hashes, and their first
eight bytes hardly ever agree, so these are compared as numbers. A peer may choose its tags,
however: where two begin alike, all of them are compared by all their bytes, which takes longer.
"""

import numpy as np
import numpy.typing as npt

Tags = npt.NDArray[np.bytes_]
Positions = npt.NDArray[np.int64]


class SortedTags:
    """Tags in the order of their bytes.

    Args:
        tags: in any order, (tags,), each of a multiple of eight bytes.
    """

    def __init__(self, tags: Tags) -> None:
        leading = _leading(tags)
        order = np.argsort(leading)
        leading = leading[order]
        is_ambiguous = bool((leading[1:] == leading[:-1]).any())
        if is_ambiguous:
            order = np.argsort(tags, kind="stable")
        self._leading = None if is_ambiguous else leading
        self.order: Positions = order.astype(np.int64, copy=False)
        """The position that each of the sorted tags had, (tags,)."""

        self.tags: Tags = tags[order]  # the tags themselves, (tags,)

    @property
    def has_repeats(self) -> bool:
        return self._leading is None and bool((self.tags[1:] == self.tags[:-1]).any())

    def find(self, wanted: "SortedTags") -> Positions:
        """Return where each wanted tag is among the tags, -1 for those that are not, (wanted,)."""
        if not len(self.tags):
            return np.full(len(wanted.tags), -1)
        if self._leading is None:
            places = np.searchsorted(self.tags, wanted.tags)
        else:
            places = np.searchsorted(self._leading, _leading(wanted.tags))
        places = np.minimum(places, len(self.tags) - 1)
        return np.where(self.tags[places] == wanted.tags, places, -1)


def _leading(tags: Tags) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of each tag as a number, which is in the order of the bytes."""
    numbers = np.ascontiguousarray(tags).view(">u8")
    return numbers[:: tags.dtype.itemsize // 8].astype(np.uint64)
