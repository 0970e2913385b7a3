"""Objects that are closed at the end of a block."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...
