"""Own features in a request, of every kind of column: the bits of the same rows in the table."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from splitveil.active_party.http.own_features import GivenFeatures
from splitveil.active_party.http.programs import Unusable
from splitveil.active_party.predict.predictor import JointModel
from tests.support.inference import Program, Trained, asked, predicting, train, write_wide_deep
from tests.support.runs import CPU
from tests.support.texts import write_tokenizer

WORDS = ("red", "green", "blue", "", "grey")
GAPS: dict[str, dict[str, object]] = {
    "mean": {"missing_numeric": "mean"},
    "median": {"missing_numeric": "median", "missing_indicator": True},
    "zero": {"missing_numeric": "zero", "missing_indicator": True},
}
Row = dict[str, Any]


def write_all_kinds(folder: Path, gaps: dict[str, object]) -> None:
    """Write an example whose active party has every kind of feature but images."""
    write_wide_deep(folder, rows=300)
    lines = (folder / "active.csv").read_text().splitlines()
    generator = np.random.default_rng(11)
    rows = [f"{lines[0]},since,tags,note,visits"]
    write_tokenizer(folder / "tokenizer.json")
    for line in lines[1:]:
        own, label, n1, n2, word = line.split(",")
        day = f"2026-{generator.integers(1, 13):02d}-{generator.integers(1, 29):02d}"
        since = f"{day}T{generator.integers(0, 24):02d}:30:00"
        tags = "|".join(generator.choice(WORDS, size=generator.integers(0, 4)))
        n1, since, word = ("" if generator.random() < 0.2 else text for text in (n1, since, word))
        note, visits = "the good" * bool(tags), "|".join(filter(str.isdigit, n2[-4:])) * bool(tags)
        rows.append(",".join([own, label, n1, n2, word, since, tags, note, visits]))
    (folder / "active.csv").write_text("\n".join(rows) + "\n")
    settings = yaml.safe_load((folder / "active.yaml").read_text())
    settings["data"]["features"] = {
        "numeric": "n*",
        "categorical": "word",
        "timestamps": "since",
        "timestamp_parts": ["month", "day_of_week", "hour"],
        "lists": "tags",
        "sequences": {
            "note": {"tokenizer": "tokenizer.json", "max_length": 2},
            "visits": {"num_tokens": 10, "max_length": 3},
        },
        **gaps,
    }
    (folder / "active.yaml").write_text(yaml.safe_dump(settings))


@pytest.fixture(scope="module", params=GAPS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp(str(request.param))
    write_all_kinds(folder, GAPS[str(request.param)])
    return train(folder, folder / "runs", active=("serving.fallback=true",))


@pytest.fixture(scope="module")
def program(trained: Trained) -> Iterator[Program]:
    with asked(trained) as program:
        yield program


def cells_of(trained: Trained, ids: list[str]) -> list[dict[str, str]]:
    with (trained.settings.active.base_dir / "active.csv").open(newline="") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    return [rows[text] for text in ids]


def as_json(cells: dict[str, str]) -> Row:
    return {
        "n1": float(cells["n1"]) if cells["n1"] else None,
        "n2": float(cells["n2"]),
        "word": cells["word"] or None,
        "since": cells["since"] or None,
        "tags": [tag for tag in cells["tags"].split("|") if tag],
        "note": cells["note"],
        "visits": [int(one) for one in cells["visits"].split("|") if one],
    }


def test_given_features_have_the_bits_of_the_table(trained: Trained, program: Program) -> None:
    ids = trained.test_ids[:40]
    cells = cells_of(trained, ids)
    for name in ("n1", "since", "word", "tags", "note", "visits"):
        assert {bool(row[name]) for row in cells} == {True, False}, name
    with predicting(trained) as predictor:
        right = predictor.predict(ids).probabilities
    answer = program.ask(ids, features=[as_json(row) for row in cells])
    alone = [program.ask(ids[i : i + 1], features=[as_json(cells[i])]) for i in range(20)]
    np.testing.assert_array_equal(answer.probabilities, right)
    one_by_one = [one.probabilities for one in alone]
    np.testing.assert_array_equal(np.concatenate(one_by_one), right[:20])


def test_lists_and_texts_with_separators_are_the_same(trained: Trained, program: Program) -> None:
    ids = trained.test_ids[:10]
    cells = cells_of(trained, ids)
    as_texts = [as_json(row) | {name: row[name] for name in ("tags", "visits")} for row in cells]
    without = [as_json(row) | {"tags": []} for row in cells]
    answer = program.ask(ids, features=as_texts).probabilities
    np.testing.assert_array_equal(answer, program.ask(ids).probabilities)
    assert (program.ask(ids, features=without).probabilities != answer).any()


def test_a_row_of_gaps_alone_is_answered(trained: Trained, program: Program) -> None:
    gaps: Row = dict.fromkeys(["n1", "n2", "word", "since", "tags", "note", "visits"])
    answer = program.ask(trained.test_ids[:1], features=[gaps])
    empty = program.ask(trained.test_ids[:1], features=[gaps | {"tags": []}])
    assert answer.status == empty.status == 200, answer.body
    assert answer.body["probabilities"] == empty.body["probabilities"]


WRONG: list[tuple[Row, str, str]] = [
    ({"n1": "much"}, "n1", "numbers"),
    ({"n1": True}, "n1", "number"),
    ({"n1": {"more": 1}}, "n1", "number"),
    ({"n1": [1.5]}, "n1", "number"),
    ({"n1": ["a"]}, "n1", "numbers"),
    ({"n1": float("inf")}, "n1", "float32"),
    ({"n1": 10**400}, "n1", ""),
    ({"since": "tomorrow"}, "since", "2026-03-01"),
    ({"since": "2026-13-01"}, "since", "2026-03-01"),
    ({"since": 1767225600}, "since", "times as texts"),
    ({"since": ["2026-03-01"]}, "since", "times as texts"),
    ({"tags": 7}, "tags", "texts"),
    ({"tags": [7]}, "tags", "texts"),
    ({"tags": [None]}, "tags", "texts"),
    ({"tags": ["a\x1fb"]}, "tags", "control character"),
    ({"word": ["red"]}, "word", "texts"),
    ({"note": ["the"]}, "note", "texts"),
    ({"visits": 7}, "visits", "texts"),
    ({"visits": ["7", "10"]}, "visits", "from 0 to 9 in row 1"),
    ({"visits": [7, -1]}, "visits", "from 0 to 9 in row 1"),
    ({"visits": [True]}, "visits", "lists of whole numbers"),
    ({"visits": [7, None]}, "visits", "lists of whole numbers"),
    ({"more": 1}, "word", "expected only"),
]


def test_a_value_that_cannot_be_used_is_named_by_its_column_and_never_repeated(
    trained: Trained, program: Program
) -> None:
    ids = trained.test_ids[:1]
    (cells,) = cells_of(trained, ids)
    right = as_json(cells) | {"n1": 0.5, "since": "2026-03-01"}
    for wrong, name, expected in WRONG:
        given = {"ids": ids, "features": [right | wrong]}
        answer = program.post(json.dumps(given).encode())
        assert answer.status == 422, (wrong, answer.body)
        detail = answer.body["detail"]
        assert name in detail, wrong
        assert expected in detail, wrong
        for value in ("much", "tomorrow", "2026-13", "1767225600", "a\x1fb"):
            assert value not in detail
    assert program.ask(ids).status == 200


def test_a_column_that_some_rows_lack_is_named_with_the_rows(
    trained: Trained, program: Program
) -> None:
    ids = trained.test_ids[:3]
    rows = [as_json(row) for row in cells_of(trained, ids)]
    del rows[1]["since"]
    answer = program.ask(ids, features=rows)
    none = program.ask(ids[:1], features=[{"n1": 1.0}])
    assert (answer.status, none.status) == (422, 422)
    assert "'since': missing in row 2" in answer.body["detail"]
    assert "columns are missing: n2, word, since, tags, note, visits" in none.body["detail"]


class Unread(dict[str, object]):
    """A row with more columns than the model has, whose values nobody has to look at."""

    def get(self, *_: object) -> None:
        raise AssertionError("read")

    __getitem__ = get


def test_rows_of_columns_that_the_model_does_not_have_are_refused_unread(program: Program) -> None:
    rows = [Unread({f"{row} {column}": 1 for column in range(20)}) for row in range(20)]
    with pytest.raises(Unusable, match="expected only"):
        program.service.given.of_rows(rows, len(rows))


def test_unknown_categories_of_requests_are_logged_at_each_doubling(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    settings = trained.settings.active
    given = GivenFeatures(settings.data, JointModel.load(settings, CPU).encoder)
    row = as_json(cells_of(trained, trained.test_ids[:1])[0])
    for number in range(1, 10):
        given.of_rows([row | {"word": "x"}] * number + [row | {"tags": ["new"]}], number + 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"features: column {name!r}: {rows} of {number + 1} rows have categories that no training "
        f"row had, and count as unknown"
        for number in (1, 2, 4, 8)
        for name, rows in (("word", number), ("tags", 1))
    ]
