"""Fixtures of the tests of the protocol."""

import pytest

from splitveil.common.alignment import ecdh


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several chunks of ids from a few."""
    monkeypatch.setattr(ecdh, "CHUNK_IDS", 16)
