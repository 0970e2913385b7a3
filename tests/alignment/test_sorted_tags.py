"""Tags of a peer that chooses them, beside this party's own."""

import random

import numpy as np
import pytest

from splitveil.common.alignment.common_tags import SortedTags

OWN = [random.Random(7).randbytes(8) + bytes([n]) * 8 for n in range(200)]
"""All begin alike, and end otherwise."""

APART = [random.Random(n).randbytes(16) for n in range(200)]


def sorted_tags(tags: list[bytes]) -> SortedTags:
    return SortedTags(np.frombuffer(b"".join(tags), "S16"))


def in_order(tags: SortedTags) -> list[bytes]:
    joined = tags.tags.tobytes()
    return [joined[start : start + 16] for start in range(0, len(joined), 16)]


@pytest.mark.parametrize("own", [OWN, APART, OWN + APART])
def test_tags_are_in_the_order_of_their_bytes_however_they_begin(own: list[bytes]) -> None:
    mixed = random.Random(1).sample(own, len(own))
    found = sorted_tags(mixed)
    assert in_order(found) == sorted(own)
    assert [mixed[position] for position in found.order] == sorted(own)
    assert not found.has_repeats
    assert sorted_tags([*mixed, mixed[3]]).has_repeats


@pytest.mark.parametrize("own", [OWN, APART, APART[:1], []])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_tag_that_only_begins_as_one_of_a_party_is_not_found(
    own: list[bytes], is_last: bool
) -> None:
    """The peer knows all tags, and changes the last byte, or the one behind the number."""
    place = 15 if is_last else 8
    forged = [tag[:place] + bytes([tag[place] ^ 255]) + tag[place + 1 :] for tag in own]
    ends = [bytes(16), b"\xff" * 16]
    wanted = sorted_tags([*forged, *ends, *own])
    places = sorted_tags(own).find(wanted)
    expected = sorted(own)
    found = [expected[place] if place >= 0 else None for place in places.tolist()]
    assert found == [tag if tag in own else None for tag in in_order(wanted)]
    assert sum(one is not None for one in found) == len(own)
