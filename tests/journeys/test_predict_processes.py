"""The real commands for predictions: a passive party that is killed, stopped, or away."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pyarrow import csv, parquet

from splitveil.simulation import free_address
from tests.certificates import make, use
from tests.runs import write_example
from tests.system.processes import Party, started

SLOW = "answers.ids_per_second=60"
"""With the 400 ids of the example, answers take seconds: time to be killed in the middle."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that has trained, over mutual TLS, and its ids."""
    folder = tmp_path_factory.mktemp("trained")
    write_example(folder)
    use(make(folder / "certificates"), folder)
    with started(folder) as pair:
        assert pair.wait() == (0, 0), pair.outputs
    ids = [f"person-{number:05d}" for number in range(400)]
    (folder / "ids.txt").write_text("\n".join(ids) + "\n")
    return folder


def served(folder: Path, address: str, *overrides: str) -> Party:
    passive = Party("passive", folder, f"answers.listen={address}", *overrides, command="serve")
    passive.wait_until_says("waiting for the active party")
    return passive


def predicting(folder: Path, address: str, output: str, *overrides: str) -> Party:
    options = ("--ids", str(folder / "ids.txt"), "--output", str(folder / output), "--json")
    where = f"inference.connect.passive={address}"
    return Party(
        "active", folder, where, *overrides, command="predict", options=options, log=output
    )


def probabilities(path: Path) -> NDArray[np.float32]:
    table = csv.read_csv(path) if path.suffix == ".csv" else parquet.read_table(path)
    return np.asarray(table.column("probability").to_numpy(), np.float32)


def summary_of(active: Party) -> dict[str, object]:
    (text,) = re.findall(r"^{\n.*?^}$", active.output, re.MULTILINE | re.DOTALL)
    found: dict[str, object] = json.loads(text)
    return found


def undisturbed(folder: Path, output: str = "undisturbed.parquet") -> Path:
    path = folder / output
    if not path.exists():
        address = free_address()
        passive = served(folder, address)
        try:
            active = predicting(folder, address, output)
            assert active.wait() == 0, active.output
            summary = summary_of(active)
            assert summary["rows"] == 400
            assert summary["found"] == 360
            assert summary["missing_at"] == {"active": 20, "passive": 20}
        finally:
            passive.kill()
    return path


def test_a_csv_file_holds_the_same_numbers_as_a_parquet_file(folder: Path) -> None:
    table = parquet.read_table(undisturbed(folder))
    assert table.column_names == ["id", "probability", "found"]
    ids = (folder / "ids.txt").read_text().splitlines()
    assert table.column("id").to_pylist() == ids
    as_csv = probabilities(undisturbed(folder, "undisturbed.csv"))
    np.testing.assert_array_equal(as_csv, probabilities(undisturbed(folder)))
    assert np.isnan(as_csv).sum() == 40


def test_a_prediction_survives_a_passive_party_that_is_killed_and_comes_back(folder: Path) -> None:
    address = free_address()
    first = served(folder, address, SLOW)
    transcript = folder / "runs" / "small" / "passive" / "serve" / "transcript.jsonl"
    asked_before = transcript.read_bytes().count(b"Embed request")
    active = predicting(folder, address, "survived.parquet")
    try:
        first.wait_until(
            lambda: transcript.read_bytes().count(b"Embed request") > asked_before, "a question"
        )
        first.kill()
        active.wait_until_says("trying for up to")
        second = served(folder, address)
        try:
            assert active.wait() == 0, active.output
            second.signal(signal.SIGTERM)
            assert second.wait() == 0, second.output
            assert "answered" in second.output
        finally:
            second.kill()
    finally:
        active.kill()
        first.kill()
    np.testing.assert_array_equal(
        probabilities(folder / "survived.parquet"), probabilities(undisturbed(folder))
    )
    assert not (folder / "survived.parquet.parts").exists()


def test_a_passive_party_that_stays_away_ends_the_prediction_with_a_clear_error(
    folder: Path,
) -> None:
    active = predicting(folder, free_address(), "away.parquet", "reconnect.max_s=0.5")
    try:
        assert active.wait() == 4, active.output
    finally:
        active.kill()
    assert "has not answered for 0.5 s (reconnect.max_s)" in active.output
    assert "the same command goes on with the parts in" in active.output
    assert not (folder / "away.parquet").exists()


def test_a_stopped_prediction_leaves_no_output_and_ends_with_the_signal_s_code(
    folder: Path,
) -> None:
    address = free_address()
    passive = served(folder, address, "answers.ids_per_second=1")
    active = predicting(folder, address, "stopped.parquet")
    try:
        active.wait_until_says("predicting 400 ids")
        active.signal(signal.SIGTERM)
        assert active.wait() == 143, active.output
        passive.signal(signal.SIGTERM)
        assert passive.wait() == 0, passive.output
    finally:
        active.kill()
        passive.kill()
    assert not (folder / "stopped.parquet").exists()


def test_a_second_server_of_the_same_run_is_refused(folder: Path) -> None:
    passive = served(folder, free_address())
    second = Party(
        "passive",
        folder,
        f"answers.listen={free_address()}",
        command="serve",
        log="second",
    )
    try:
        assert second.wait() == 2, second.output
        assert "another process serves this run" in second.output
    finally:
        passive.kill()
        second.kill()
