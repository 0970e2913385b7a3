"""Random tables align as Python sets of the people in them say, however their ids are written."""

import random
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitveil.common.alignment.buckets import common_tags
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.ids import Allowed
from splitveil.common.errors import AlignmentError, InvalidMessage
from splitveil.common.run.id_rules import TextId
from tests.support.aligned import ENGINE, align_both, engine, usable_ids

pytestmark = pytest.mark.usefixtures("small_chunks")

PLAIN = CanonicalForm()
LOOSE = CanonicalForm([TextId(fold_case=True, drop_characters="-", space="remove")])
ENGINES = {1: ENGINE, 2: engine(workers=2)}


def written(person: int, draw: random.Random, form: CanonicalForm) -> str:
    """Write a person's id in one of the ways that mean the same by the rules."""
    text = f"Zo\u00eb-{person}"
    if form is LOOSE:
        text = draw.choice((text, text.upper(), text.replace("-", " "), f"zo\u00eb{person}"))
    text = draw.choice((text, unicodedata.normalize("NFD", text)))
    return draw.choice(("", " ", "\t")) + text + draw.choice(("", "  ", "\u00a0"))


def first_rows(people: Sequence[int]) -> dict[int, int]:
    return {person: row for row, person in reversed(list(enumerate(people)))}


TABLES = st.lists(st.integers(0, 40), min_size=1, max_size=40)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    tables=st.tuples(TABLES, TABLES),
    form=st.sampled_from((PLAIN, LOOSE)),
    workers=st.sampled_from((1, 1, 1, 2)),
    draw=st.randoms(use_true_random=False),
)
def test_any_two_tables_align_as_the_sets_of_their_people(
    tables: tuple[list[int], list[int]], form: CanonicalForm, workers: int, draw: random.Random
) -> None:
    own, peer = (
        usable_ids([written(person, draw, form) for person in table], form, Allowed(True))
        for table in tables
    )
    outcomes = align_both((own.ids, peer.ids), (ENGINES[workers], ENGINE))
    common = set(tables[0]) & set(tables[1])
    if not common:
        assert [type(outcome.error) for outcome in outcomes] == [AlignmentError] * 2
        return
    orders = []
    for table, ids, outcome in zip(tables, (own, peer), outcomes, strict=True):
        rows = [ids.rows[row] for row in outcome.alignment.rows.tolist()]
        firsts = first_rows(table)
        assert sorted(rows) == sorted(firsts[person] for person in common)
        orders.append([table[row] for row in rows])
    assert orders[0] == orders[1]


def tags_of(numbers: Sequence[int]) -> bytes:
    """Tags that differ in their first, last or middle bytes, with zeros at either end."""
    return b"".join((n * 256 ** (n % 16)).to_bytes(16, "little") for n in numbers)


TAGS = st.lists(st.integers(1, 255), min_size=1, max_size=60, unique=True)


@settings(max_examples=300)
@given(TAGS, TAGS)
def test_common_tags_are_those_of_both_sets_in_the_order_of_their_bytes(
    own: list[int], peer: list[int]
) -> None:
    found, positions = common_tags(*(np.frombuffer(tags_of(tags), "S16") for tags in (own, peer)))
    split = [tags_of([number]) for number in own]
    expected = sorted({*split} & {tags_of([number]) for number in peer})
    assert found.tobytes() == b"".join(expected)
    assert positions.tolist() == [split.index(tag) for tag in expected]
    assert positions.dtype == np.int64


@settings(max_examples=300)
@given(TAGS, TAGS, st.randoms(use_true_random=False), st.booleans())
def test_a_tag_that_is_twice_in_either_set_is_refused(
    own: list[int], peer: list[int], draw: random.Random, is_own: bool
) -> None:
    repeated = own if is_own else peer
    repeated.insert(draw.randrange(len(repeated) + 1), draw.choice(repeated))
    with pytest.raises(InvalidMessage, match="same tag"):
        common_tags(*(np.frombuffer(tags_of(tags), "S16") for tags in (own, peer)))
