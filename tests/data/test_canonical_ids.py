"""Ids as people have them become equal by rules that all parties share, and by nothing else."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from splitveil.active_party.defenses import Charge
from splitveil.active_party.ledger.account_book import AccountBook, open_books
from splitveil.active_party.ledger.ledger import LeakLedger
from splitveil.common.data import canonical_form, sources
from splitveil.common.data.canonical_form import CanonicalForm, compose, decompose
from splitveil.common.data.ids import Allowed, read_subjects
from splitveil.common.data.settings import DataSettings
from splitveil.common.data.table_files import read_id_list
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.run.contract import Contract
from splitveil.common.run.id_rules import (
    AS_WRITTEN,
    EmailId,
    IdRule,
    PhoneId,
    TextId,
    rules_as_bytes,
    rules_of_bytes,
)
from splitveil.common.settings import validate
from tests.support.aligned import usable_ids

CHARACTERS = "07.-+ ßŉΐίἄİi\u0307\u0345\u00a0\u00b4Aa"
TEXTS = st.text(max_size=6) | st.text(CHARACTERS, max_size=8)
RULES = st.builds(
    TextId,
    unicode=st.sampled_from(["nfc", "nfkc"]),
    fold_case=st.booleans(),
    drop_characters=st.sampled_from(["", "-+/", "()"]),
    space=st.sampled_from(["trim", "collapse", "remove"]),
    whole_numbers=st.booleans(),
    leading_zeros=st.sampled_from(["keep", "drop"]),
)

EXAMPLES: list[tuple[IdRule, dict[str, str]]] = [
    (TextId(), {" Zoe\u0308 ": "Zo\u00eb", "C17": "C17", "007": "007", "7.0": "7.0", "\t": ""}),
    (TextId(unicode="nfkc"), {"\uff11\uff12": "12", "\ufb01x": "fix"}),
    (TextId(fold_case=True), {"C17": "c17", "STRASSE": "strasse", "Straße": "strasse"}),
    (TextId(drop_characters="-./"), {"123-45/6.7": "1234567", "--": ""}),
    (TextId(space="collapse"), {" Ann   Lee ": "Ann Lee"}),
    (TextId(space="remove"), {"DE89 3704 0044": "DE8937040044"}),
    (TextId(whole_numbers=True), {"7.0": "7", "7.": "7", "-7.00": "-7", "7.5": "7.5", "7": "7"}),
    (TextId(leading_zeros="drop"), {"007": "7", "000": "0", "0x7": "0x7", "-07": "-07"}),
    (TextId(whole_numbers=True, leading_zeros="drop"), {"007.0": "7"}),
    (EmailId(kind="email"), {"Ann@Example.COM": "ann@example.com", "ann@": "", "a b@x.org": ""}),
    (EmailId(kind="email"), {"x@b\u00fccher.example": "x@b\u00fccher.example"}),
    (EmailId(kind="email"), {"x@xn--bcher-kva.example": "x@b\u00fccher.example"}),
    (EmailId(kind="email", fold_case=False), {"Ann@Example.COM": "Ann@example.com"}),
    (PhoneId(kind="phone"), {"+39 02 3661 8300": "+390236618300", "02 3661 8300": ""}),
    (PhoneId(kind="phone", region="IT"), {"02 3661 8300": "+390236618300", "12": "", "abc": ""}),
    (PhoneId(kind="phone", region="IT"), {"0039 02 36618300": "+390236618300"}),
]


@pytest.mark.parametrize(("rule", "examples"), EXAMPLES)
def test_each_rule_does_what_its_table_says(rule: IdRule, examples: dict[str, str]) -> None:
    assert CanonicalForm([rule]).of(list(examples)) == list(examples.values())


@given(RULES.filter(lambda rule: isinstance(rule, TextId)), TEXTS)
def test_canonical_texts_are_canonical(rule: TextId, text: str) -> None:
    once = CanonicalForm([rule]).of([text])
    assert CanonicalForm([rule]).of(once) == once


@given(st.emails(), st.booleans())
def test_canonical_addresses_are_canonical(text: str, fold_case: bool) -> None:
    form = CanonicalForm([EmailId(kind="email", fold_case=fold_case)])
    assert form.of(form.of([text])) == form.of([text])


@given(
    st.from_regex(r"\A\+?[0-9 ()/-]{3,16}( ext [0-9]{1,4})?\Z"),
    st.sampled_from([None, "US", "IT", "DE", "AR"]),
)
def test_canonical_telephone_numbers_are_canonical(text: str, region: str | None) -> None:
    form = CanonicalForm([PhoneId(kind="phone", region=region)])
    assert form.of(form.of([text])) == form.of([text])


@given(st.lists(st.text(), min_size=2, max_size=4), st.lists(st.text(), min_size=2, max_size=4))
def test_composed_ids_are_equal_only_if_all_parts_are(first: list[str], second: list[str]) -> None:
    assert (compose(first) == compose(second)) == (first == second)
    assert decompose(compose(first), len(first)) == tuple(first)
    assert decompose(compose(first), len(first) + 1) is None


def test_the_joint_between_parts_counts() -> None:
    assert compose(["ab", "c"]) == "2:ab1:c"
    assert compose(["a", "bc"]) == "1:a2:bc"
    for other in ("2:ab1:", "2:ab1:cd", "02:ab1:c", "2ab", "", "9:ab", "2:ab", "1:a1:b1:c"):
        assert decompose(other, 2) is None


# ---- tables ----


def settings(path: str, **values: Any) -> DataSettings:
    source = {"kind": path.rpartition(".")[2], "path": path}
    if "cache_dir" in values:
        source["cache_dir"] = values.pop("cache_dir")
    given_values = {"source": source, "features": {"numeric": "x"}, **values}
    return validate(DataSettings, given_values, "data")


MESSY = """surname,born,x
Maier,1980,1
Lee,1990,2
MAIER ,1980.0,3
,1970,4
Lee,1990,5
Zoë,0,6
"""


@pytest.mark.parametrize("cached", [False, True])
def test_rows_are_left_out_as_the_settings_say_and_counted(
    tmp_path: Path, cached: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 16)
    (tmp_path / "x.csv").write_text(MESSY)
    rules = (TextId(fold_case=True), TextId(whole_numbers=True))
    chosen = settings(
        "x.csv",
        id_column=["surname", "born"],
        duplicate_ids="first",
        unusable_ids="leave_out",
        **({"cache_dir": "cache"} if cached else {}),
    )
    for _ in range(2):  # the second time, from the copy if there is one
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            data = PartyData.load(chosen, tmp_path, id_rules=rules)
        assert list(data.ids) == ["5:maier4:1980", "3:lee4:1990", "3:zoë1:0"]
        assert np.asarray(data.table.numeric["x"]).tolist() == [1, 2, 6]
        assert data.kept is not None
        assert data.kept.tolist() == [0, 1, 5]
        assert len(data.table) == 3
        (said,) = caplog.messages
        assert "columns 'surname', 'born': 3 of 6 rows" in said
        changed = data.table.id_report.in_words()
        assert "fold_case of 'surname' changed 5" in changed
        assert "whole_numbers of 'born' changed 1" in changed
        assert "3 of 6 rows left out: 1 without a usable id, 1 with the id of an earlier" in said
        assert "1 whose id only the rules make equal" in said
        assert "aier" not in said


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("allowed", "expected", "absent"),
    [
        ({}, "1 missing or empty ids: data rows ", "nothing"),
        ({"unusable_ids": "leave_out"}, "1 ids equal to another id once normalised", "missing"),
        ({"duplicate_ids": "first"}, "1 missing or empty ids", "equal to another"),
    ],
)
def test_rows_that_may_not_be_left_out_are_an_error_with_their_numbers(
    tmp_path: Path, cached: bool, allowed: dict[str, str], expected: str, absent: str
) -> None:
    (tmp_path / "x.csv").write_text(MESSY)
    chosen = settings(
        "x.csv",
        id_column=["surname", "born"],
        **allowed,
        **({"cache_dir": "cache"} if cached else {}),
    )
    rules = (TextId(fold_case=True), TextId(whole_numbers=True))
    with pytest.raises(DataError) as caught:
        PartyData.load(chosen, tmp_path, id_rules=rules)
    assert expected in str(caught.value)
    assert absent not in str(caught.value)
    assert "aier" not in str(caught.value)


@pytest.mark.parametrize(
    "rule", [TextId(), TextId(unicode="nfkc", fold_case=True), EmailId(kind="email")]
)
def test_marks_that_would_take_hours_to_order_are_never_ordered(
    rule: IdRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normalising takes the square of their number: a second for twenty thousand."""
    monkeypatch.setattr(canonical_form, "normalize", None)
    with pytest.raises(DataError, match=r"more than 1,024 characters"):
        CanonicalForm([rule]).of(["a" + 512 * "\u0300\u0316"])
    assert CanonicalForm().of([20_000 * "a"]) == [20_000 * "a"]


def test_what_no_rule_can_read_is_named_by_row() -> None:
    raw = ["ann@example.com", "ann(at)example.com", "", "bob@example.com"]
    form = CanonicalForm([EmailId(kind="email")])
    with pytest.raises(DataError) as caught:
        usable_ids(raw, form)
    assert str(caught.value).splitlines() == [
        "t: 1 missing or empty ids: data rows 3",
        "t: 1 ids that are none by the rules of contract.ids: data rows 2",
    ]
    assert usable_ids(raw, form, Allowed(unusable=True)).rows == [0, 3]
    with pytest.raises(DataError, match="none of the 2 rows has a usable id"):
        usable_ids(raw[1:3], form, Allowed(unusable=True))


def test_whole_numbers_may_be_stored_as_floats_if_the_rule_says_so(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": [7.0, 8.0, None], "x": [1, 2, 3]}), tmp_path / "x.parquet")
    rules = (TextId(whole_numbers=True),)
    chosen = settings("x.parquet", id_column="id", unusable_ids="leave_out")
    assert list(PartyData.load(chosen, tmp_path, id_rules=rules).ids) == ["7", "8"]
    with pytest.raises(DataError, match="whole_numbers: true"):
        PartyData.load(chosen, tmp_path)
    single = pa.array([7.0, 2.0**24 + 2], pa.float32())
    parquet.write_table(pa.table({"id": single, "x": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"whole numbers up to 2\^24 in row 2"):
        PartyData.load(chosen, tmp_path, id_rules=rules)
    for wrong in (7.5, 2.0**53 + 2, float("inf")):
        parquet.write_table(pa.table({"id": [7.0, wrong], "x": [1, 2]}), tmp_path / "x.parquet")
        with pytest.raises(DataError, match=r"whole numbers up to 2\^53 in row 2"):
            PartyData.load(chosen, tmp_path, id_rules=rules)


@pytest.mark.parametrize(
    ("id_column", "rules", "message"),
    [
        (["a", "b"], AS_WRITTEN, r"2 columns make up the id here.*rules for 1.*ids: \[{}, {}\]"),
        ("a", (TextId(), TextId()), r"1 column make up the id here.*rules for 2"),
        (None, (TextId(fold_case=True),), "numbers of its rows"),
    ],
)
def test_the_contract_has_rules_for_each_column(
    tmp_path: Path, id_column: Any, rules: tuple[IdRule, ...], message: str
) -> None:
    (tmp_path / "x.csv").write_text("a,b,x\n1,2,3\n")
    for cache in ({}, {"cache_dir": "cache"}):
        with pytest.raises(SettingsError, match=message):
            PartyData.load(settings("x.csv", id_column=id_column, **cache), tmp_path, None, rules)


def test_lists_of_ids_undergo_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text("b,a\n007,X\n8,y\n")
    chosen = settings("x.csv", id_column=["a", "b"])
    rules = (TextId(fold_case=True), TextId(leading_zeros="drop"))
    found = read_id_list(tmp_path / "ids.csv", chosen, rules)
    assert found.ids == ["1:x1:7", "1:y1:8"]
    assert found.written.to_pydict() == {"a": ["X", "y"], "b": ["007", "8"]}
    (tmp_path / "ids.txt").write_text("x\n")
    with pytest.raises(DataError, match=r"a table .* with the columns 'a', 'b'"):
        read_id_list(tmp_path / "ids.txt", chosen, rules)


def test_persons_are_distinguished_by_the_rules_of_their_column(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("person,day,x\nAnn,1,1\nANN,2,2\nbob,1,3\n")
    chosen = settings("x.csv", id_column=["person", "day"])
    first, second, third = read_subjects(
        chosen, tmp_path, "person", (TextId(fold_case=True), TextId())
    )
    assert first == second != third


# ---- the contract and what runs leave ----


def contract(**values: Any) -> Contract:
    return Contract(run_name="r", cut_shape=(1,), batch_size=1, epochs=1, **values)


def test_a_contract_without_rules_is_the_one_of_old_runs() -> None:
    plain = contract()
    assert plain == contract(ids={}) == contract(ids=[{"kind": "text"}])
    assert '"ids"' not in plain.canonical_json()
    other = contract(ids={"fold_case": True})
    assert plain.fields_differing_from(other.canonical_json()) == ["ids"]
    assert other.fields_differing_from(plain.canonical_json()) == ["ids"]
    named = contract(ids=[{"name": "surname"}, {"name": "born"}])
    swapped = contract(ids=[{"name": "born"}, {"name": "surname"}])
    assert named.fields_differing_from(swapped.canonical_json()) == ["ids"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least 1"),
        ([{}] * 9, "at most 8"),
        ({"kind": "passport"}, "expected kind text or email or phone"),
        ({"drop_characters": "ab"}, "expected punctuation marks"),
        ({"drop_characters": "-.", "whole_numbers": True}, r"7\.0 would become 70"),
        ({"kind": "phone", "region": "Italy"}, "a text of the form"),
        ({"kind": "email", "leading_zeros": "drop"}, "unknown setting"),
    ],
)
def test_rules_that_make_no_sense_are_refused(ids: Any, message: str) -> None:
    values = {"run_name": "r", "cut_shape": [1], "batch_size": 1, "epochs": 1, "ids": ids}
    with pytest.raises(SettingsError, match=message):
        validate(Contract, values, "contract")


def test_an_unknown_country_is_refused() -> None:
    with pytest.raises(SettingsError, match="knows no XX"):
        CanonicalForm([PhoneId(kind="phone", region="XX")])


def test_an_account_book_is_refused_under_other_rules(tmp_path: Path) -> None:
    """Otherwise each account would begin at zero, because its example has another name."""
    rules = rules_as_bytes((TextId(fold_case=True),))
    assert rules_of_bytes(rules) == (TextId(fold_case=True),)
    for name, under in (("plain", b""), ("folded", rules)):
        ledger = LeakLedger(1)
        ledger.charge(np.arange(1), Charge(0.5))
        book = AccountBook.empty(under).closing_book(["ann"], ledger)
        from safetensors.torch import save_file

        (tmp_path / name).mkdir()
        save_file(
            {key: value.contiguous() for key, value in book.state_dict().items()},
            tmp_path / name / "ledger.safetensors",
        )
    assert len(open_books([tmp_path / "folded"], rules)) == 1
    assert len(open_books([tmp_path / "plain"])) == 1
    for name, under in (("plain", rules), ("folded", b"")):
        with pytest.raises(SettingsError, match="by other rules"):
            open_books([tmp_path / name], under)
    state = AccountBook.empty(rules).state_dict() | {"id_rules": torch.zeros(3)}
    with pytest.raises(ValueError, match="by which rules"):
        AccountBook.from_state(state)
