"""``align``: two files in, two aligned files out, by the commands of both parties."""

import csv
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pyarrow import parquet

from splitveil.common.data.converted import stamps_of
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party import aligned_table
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.record.transcript import Broken, compare, verify
from splitveil.common.run.sample_order import CommonOrder
from splitveil.common.wire.limits import CHUNK_IDS, POINT_BYTES
from splitveil.passive_party.settings import PassiveSettings
from tests.support.processes import Pair, Party
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, write_example, write_yaml
from tests.support.simulation import free_address
from tests.support.waiting import wait_until

Row = dict[str, Any]


PEOPLE = [(f"Näme{number % 97}", f"{1000 + number}") for number in range(400)]
RULES = [
    {"name": "surname", "fold_case": True},
    {"name": "number", "whole_numbers": True, "leading_zeros": "drop"},
]


def write_table(path: Path, *rows: list[Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def write_parties(folder: Path) -> None:
    """The label owner has people 0 to 319, as NÄME and 0123; the other 60 to 399, as Näme, 123.0"""
    draw = random.Random(3)
    owned = draw.sample(PEOPLE[:320], 320)
    labels = [[s.upper(), f"0{n}", draw.randint(0, 1), draw.random()] for s, n in owned]
    features = [[f"{n}.0", f" {s}", draw.random()] for s, n in draw.sample(PEOPLE[60:], 340)]
    write_table(folder / "labels.csv", ["surname", "no", "y", "z"], *labels, ["", 5, 1, 1.0])
    write_table(folder / "features.csv", ["nr", "name", "x"], *features)
    labelled = {
        "source": {"kind": "csv", "path": "labels.csv"},
        "id_column": ["surname", "no"],
        "unusable_ids": "leave_out",
        "label_column": "y",
        "features": {"numeric": "z"},
    }
    used = {
        "source": {"kind": "csv", "path": "features.csv", "cache_dir": "cache"},
        "id_column": ["name", "nr"],
        "features": {"numeric": "x"},
    }
    write_yaml(
        folder,
        contract=CONTRACT | {"ids": RULES},
        active=ACTIVE | {"data": labelled},
        passive=PASSIVE | {"data": used, "adversary": None},
    )


@contextmanager
def aligning_both(
    folder: Path, *both: str, outputs: tuple[str, str] = ("active_out.csv", "passive_out.csv")
) -> Iterator[Pair]:
    address = free_address()
    options = [("--json", "--output", str(folder / output)) for output in outputs]
    own, where = f"connect={address}", f"listen={address}"
    with (
        Party("active", folder, where, *both, command="align", options=options[0]) as active_party,
        Party("passive", folder, own, *both, command="align", options=options[1]) as passive_party,
    ):
        yield Pair(active_party, passive_party)


def rows_of(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        found: list[Row] = parquet.read_table(path).to_pylist()
        return found
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def json_in(output: str) -> dict[str, Any]:
    document, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
    found: dict[str, Any] = document
    return found


def test_both_have_their_own_rows_of_the_common_ids_in_one_order(tmp_path: Path) -> None:
    write_example(tmp_path, rows=300)
    before = {name: rows_of(tmp_path / f"{name}.csv") for name in ("active", "passive")}

    with aligning_both(tmp_path, outputs=("active_out.parquet", "passive_out.csv")) as pair:
        assert pair.wait() == (0, 0), pair.outputs
        said = [json_in(party.output) for party in pair]

    active = rows_of(tmp_path / "active_out.parquet")
    passive = rows_of(tmp_path / "passive_out.csv")
    common = {row["id"] for row in before["active"]} & {row["id"] for row in before["passive"]}
    assert len(common) == 270
    assert [row["id"] for row in active] == [row["id"] for row in passive]
    assert sorted(row["id"] for row in active) == sorted(common)
    assert [row["id"] for row in active] != sorted(common)
    for name, after in (("active", active), ("passive", passive)):
        whole = {row["id"]: row for row in before[name]}
        assert all(row == whole[row["id"]] for row in after)
    for name in ("active_out.parquet", "passive_out.csv"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert [one["aligned"] for one in said] == [270, 270]
    assert [one["ids"] for one in said] == [285, 285]
    assert len({(one["run_id"], one["fingerprint"]) for one in said}) == 1
    found = [
        verify(tmp_path / "runs" / "small" / "alignment" / party / "transcript.jsonl")
        for party in ("active", "passive")
    ]
    assert not any(isinstance(one, Broken) for one in found)
    compared = compare(*[one for one in found if not isinstance(one, Broken)])
    assert compared.agreed
    assert not compared.unsent
    left = {path.name for path in (tmp_path / "runs" / "small").iterdir()}
    assert "alignment" in left
    assert not left & {"active", "passive"}, "nothing was trained"


def test_composite_ids_and_duplicates_are_aligned_by_the_contract_s_rules(tmp_path: Path) -> None:
    write_parties(tmp_path)
    with (tmp_path / "features.csv").open("a", encoding="utf-8") as file:
        twin = rows_of(tmp_path / "features.csv")[0]
        file.write(f"{twin['nr']},{twin['name']},99\r\n")
    values = yaml.safe_load((tmp_path / "passive.yaml").read_text())
    values["data"]["duplicate_ids"] = "first"
    (tmp_path / "passive.yaml").write_text(yaml.safe_dump(values))

    with aligning_both(tmp_path) as pair:
        assert pair.wait() == (0, 0), pair.outputs

    def canonical(row: Row, surname: str, number: str) -> tuple[str, int]:
        return row[surname].strip().lower(), int(float(row[number]))

    active = [canonical(row, "surname", "no") for row in rows_of(tmp_path / "active_out.csv")]
    after = rows_of(tmp_path / "passive_out.csv")
    assert active == [canonical(row, "name", "nr") for row in after]
    assert sorted(active) == sorted((f"näme{n % 97}", 1000 + n) for n in range(60, 320))
    assert "99" not in {row["x"] for row in after}


def test_too_few_common_ids_end_both_and_leave_earlier_outputs_as_they_were(tmp_path: Path) -> None:
    write_example(tmp_path, rows=120)
    text = (tmp_path / "passive.csv").read_text(encoding="utf-8")
    (tmp_path / "passive.csv").write_text(text.replace("person-", "other-"), encoding="utf-8")
    (tmp_path / "active_out.csv").write_text("of last week")

    with aligning_both(tmp_path) as pair:
        assert pair.wait() == (3, 3), pair.outputs

    assert (tmp_path / "active_out.csv").read_text(encoding="utf-8") == "of last week"
    assert not (tmp_path / "passive_out.csv").exists()


def stored_bytes(party: Party, peer: str, name: str) -> int:
    exchanges = party.runs / "small" / "alignment" / f".{party.party}.exchanges"
    with suppress(FileNotFoundError):  # the bucket has ended meanwhile
        return max(
            (path.stat().st_size for path in (exchanges / peer).glob(f"*/{name}")), default=0
        )
    return 0


def test_parties_that_are_killed_resume_the_exchange_and_find_exactly_the_common_ids(
    tmp_path: Path,
) -> None:
    write_example(tmp_path, rows=21_000)  # three chunks of points in each bucket
    both = "insecure_nonce_seed=null", "contract.alignment.buckets=2"  # a new nonce per alignment
    with aligning_both(tmp_path, *both) as pair:
        for chunks, (victim, peer) in enumerate((pair[::-1], pair), 1):
            least = chunks * CHUNK_IDS * POINT_BYTES
            wait_until(lambda: stored_bytes(victim, peer.party, "peer.points") >= least)  # noqa: B023
            victim.kill()
            victim.start()
        assert pair.wait() == (0, 0), pair.outputs

    assert all("resuming an exchange of ids" in party.said for party in pair), pair.outputs
    assert not list((tmp_path / "runs").rglob("state")), "a secret is left"
    ids = {
        name: [row["id"] for row in rows_of(tmp_path / f"{name}.csv")]
        for name in ("active", "passive", "active_out", "passive_out")
    }
    assert ids["active_out"] == ids["passive_out"]
    assert sorted(ids["active_out"]) == sorted({*ids["active"]} & {*ids["passive"]})


def passive_settings(folder: Path) -> PassiveSettings:
    write_example(folder, rows=120)
    return aligned_table.aligning(load_party_settings(PassiveSettings, folder / "passive.yaml"))


@pytest.mark.parametrize("name", ["out.txt", "no/folder.csv", "passive.csv"])
def test_an_output_that_cannot_be_is_refused_before_anything_is_sent(
    tmp_path: Path, name: str
) -> None:
    settings = passive_settings(tmp_path)

    with pytest.raises(SettingsError, match="--output"):
        aligned_table.check_outputs(settings, tmp_path / name)


@pytest.mark.parametrize("column", [None, "position"])
def test_positions_need_an_id_column_with_another_name(tmp_path: Path, column: str | None) -> None:
    settings = passive_settings(tmp_path)
    data = settings.data.model_copy(update={"id_column": column})
    settings = settings.model_copy(update={"data": data})

    with pytest.raises(SettingsError, match="--positions: expected"):
        aligned_table.check_outputs(settings, tmp_path / "out.parquet", positions=True)


def test_a_table_that_changes_while_its_ids_are_aligned_is_refused(tmp_path: Path) -> None:
    settings = passive_settings(tmp_path)
    stamps = stamps_of(settings.data.source, settings.base_dir)
    own = aligned_table.read_own_ids(settings)
    order = CommonOrder("run", np.array([5, 2, 9]), "")
    aligned_table.write_aligned(settings, own, stamps, order, tmp_path / "out.csv")
    before = (tmp_path / "out.csv").read_bytes()

    with (tmp_path / "passive.csv").open("a", encoding="utf-8") as file:
        file.write("person-99999,1,2,3,4,5\n")

    with pytest.raises(DataError, match="has changed"):
        aligned_table.write_aligned(settings, own, stamps, order, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes() == before
