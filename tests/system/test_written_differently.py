"""Two parties that write composite ids differently train together and predict, by one contract."""

import csv
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import Party, started
from tests.support.simulation import free_address

PEOPLE = [(f"Näme{number % 97}", f"{1000 + number}") for number in range(400)]
OPTIMIZER = {"kind": "adam", "learning_rate": 0.01}
RULES = [
    {"name": "surname", "fold_case": True},
    {"name": "number", "whole_numbers": True, "leading_zeros": "drop"},
]


def write_table(path: Path, *rows: list[Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def write_settings(path: Path, data: dict[str, Any], **values: Any) -> None:
    security = {"security": {"mode": "insecure"}, "contract": "contract.yaml"}
    given = security | {"optimizer": OPTIMIZER, "data": data} | values
    path.write_text(yaml.safe_dump(given))


def write_parties(folder: Path) -> None:
    """The label owner has people 0 to 319, as NÄME and 0123; the other 60 to 399, as Näme, 123.0"""
    draw = random.Random(3)
    owned = draw.sample(PEOPLE[:320], 320)
    used = draw.sample(PEOPLE[60:], 340)
    labels = [[s.upper(), f"0{n}", draw.randint(0, 1), draw.random()] for s, n in owned]
    features = [[f"{n}.0", f" {s}", draw.random()] for s, n in used]
    write_table(folder / "labels.csv", ["surname", "no", "y", "z"], *labels, ["", 5, 1, 1.0])
    write_table(folder / "features.csv", ["nr", "name", "x"], *features)
    contract = {
        "run_name": "differently",
        "cut_shape": [4],
        "batch_size": 64,
        "epochs": 1,
        "ids": RULES,
    }
    (folder / "contract.yaml").write_text(yaml.safe_dump(contract))
    write_settings(
        folder / "active.yaml",
        {
            "source": {"kind": "csv", "path": "labels.csv"},
            "id_column": ["surname", "no"],
            "unusable_ids": "leave_out",
            "label_column": "y",
            "features": {"numeric": "z"},
        },
        listen="127.0.0.1:50051",
        top_model={"kind": "mlp", "hidden": [4]},
        defense={"name": "none"},
    )
    write_settings(
        folder / "passive.yaml",
        {
            "source": {"kind": "csv", "path": "features.csv", "cache_dir": "cache"},
            "id_column": ["name", "nr"],
            "features": {"numeric": "x"},
        },
        connect="127.0.0.1:50051",
        bottom_model={"kind": "mlp", "hidden": [4]},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("differently")
    write_parties(folder)
    with started(folder) as pair:
        assert pair.wait() == (0, 0), pair.outputs
    return folder


@pytest.mark.parametrize("whole_table", [False, True])
def test_parties_that_write_ids_differently_train_and_predict(
    folder: Path, whole_table: bool
) -> None:
    asked = [[number, surname] for surname, number in PEOPLE[50:70]]
    write_table(folder / "ask.csv", ["no", "surname"], *asked)
    address = free_address()
    answers = f"answers.listen={address}", f"answers.whole_table={str(whole_table).lower()}"
    options = ["--ids", str(folder / "ask.csv"), "--output", str(folder / "out.csv")]
    options += ["--whole-table"] * whole_table
    where = f"inference.connect.passive={address}"
    with Party("passive", folder, *answers, command="serve") as serving:
        serving.wait_until_says("waiting for the active party")
        with Party("active", folder, where, command="predict", options=options) as predicting:
            assert predicting.wait() == 0, predicting.output
    with (folder / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["found"] for row in rows] == ["false"] * 10 + ["true"] * 10
    assert rows[10]["canonical_id"] == "6:näme604:1060"
    assert [[row["no"], row["surname"]] for row in rows] == [list(map(str, one)) for one in asked]
