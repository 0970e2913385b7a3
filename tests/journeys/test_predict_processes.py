"""The real commands predict and serve: a passive party that is killed, stopped, or away."""

import json
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import csv, parquet

from tests.support.certificates import use
from tests.support.endpoints import asked
from tests.support.inference import train
from tests.support.processes import Party
from tests.support.runs import write_example
from tests.support.simulation import free_address
from tests.support.waiting import wait_until

SLOW = "answers.ids_per_second=60"
"""With the 400 ids of the example, answers take seconds: time to be killed in the middle."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained run, certificates, and ids, some unknown to a party."""
    folder = tmp_path_factory.mktemp("trained")
    write_example(folder)
    train(folder, folder / "runs")
    use(folder / "runs" / "certificates", folder)
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


def probabilities(table: pa.Table) -> NDArray[np.float32]:
    return np.asarray(table.column("probability").to_numpy(), np.float32)


def summary_of(active: Party) -> dict[str, object]:
    (text,) = re.findall(r"^{\n.*?^}$", active.output, re.MULTILINE | re.DOTALL)
    found: dict[str, object] = json.loads(text)
    return found


def test_a_prediction_survives_a_passive_party_that_is_killed_and_comes_back(folder: Path) -> None:
    address = free_address()
    with served(folder, address):
        with predicting(folder, address, "undisturbed.csv") as active:
            assert active.wait() == 0, active.output
        where = f"answers.listen={free_address()}"
        with Party("passive", folder, where, command="serve", log="second") as second:
            assert second.wait() == 2, second.output
            assert "another process serves this run" in second.output
    summary = summary_of(active)
    assert (summary["rows"], summary["found"]) == (400, 360)
    assert summary["missing_at"] == {"active": 20, "passive": 20}
    transcript = folder / "runs" / "small" / "passive" / "serve" / "transcript.jsonl"
    with (
        served(folder, address, SLOW) as first,
        predicting(folder, address, "survived.parquet") as active,
    ):
        before = transcript.read_bytes().count(b"Embed request")
        first.wait_until(
            lambda: transcript.read_bytes().count(b"Embed request") > before, "a question"
        )
        first.kill()
        active.wait_until_says("trying for up to")
        with served(folder, address) as second:
            assert active.wait() == 0, active.output
            second.signal(signal.SIGTERM)
            assert second.wait() == 0, second.output
            assert "answered" in second.output
    table = parquet.read_table(folder / "survived.parquet")
    assert table.column_names == ["id", "canonical_id", "probability", "found"]
    assert table.column("id").to_pylist() == (folder / "ids.txt").read_text().splitlines()
    found = probabilities(table)
    assert np.isnan(found).sum() == 40
    np.testing.assert_array_equal(probabilities(csv.read_csv(folder / "undisturbed.csv")), found)
    assert not (folder / "survived.parquet.parts").exists()


def test_a_prediction_ends_if_the_passive_party_stays_away_and_by_a_signal(folder: Path) -> None:
    with predicting(folder, free_address(), "away.parquet", "reconnect.max_s=0.5") as active:
        assert active.wait() == 4, active.output
    assert "has not answered for 0.5 s (reconnect.max_s)" in active.output
    assert "the same command goes on with the parts in" in active.output
    with predicting(folder, free_address(), "stopped.parquet") as active:
        active.wait_until_says("trying for up to")
        active.signal(signal.SIGTERM)
        assert active.wait() == 143, active.output
    for name in ("away", "stopped"):
        assert not (folder / f"{name}.parquet").exists()


# ---- online ----


def serving(folder: Path, passive: str, address: str, *more: str) -> Party:
    where = (f"inference.connect.passive={passive}", f"serving.http={address}")
    return Party("active", folder, *where, *more, command="serve")


def predicted(address: str, ids: list[str]) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"ids": ids}).encode()
    request = urllib.request.Request(
        f"http://{address}/predict", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_killed_passive_party_costs_503_at_once_and_no_restart(folder: Path) -> None:
    inner, outer, own, other = (free_address() for _ in range(4))
    ids = [f"person-{number:05d}" for number in range(100, 116)]
    with (
        served(folder, inner, f"status={other}") as first,
        serving(folder, inner, outer, f"status={own}") as active,
    ):
        active.wait_until_says("answering at http://")
        before = predicted(outer, ids)
        assert asked(own, "/readyz")[0] == asked(other, "/readyz")[0] == 200
        assert 'embed_requests_total{call="Embed"} 1.0' in asked(other, "/metrics")[1]
        first.kill()
        began = time.monotonic()
        away = predicted(outer, ids)
        took_s = time.monotonic() - began
        assert asked(own, "/readyz")[0] == 503
        assert 'outcome="unavailable"} 1.0' in asked(own, "/metrics")[1]
        with served(folder, inner):
            wait_until(lambda: predicted(outer, ids)[0] == 200)
            assert predicted(outer, ids) == before
            active.signal(signal.SIGTERM)
            assert active.wait() == 0, active.output
    assert before[0] == 200
    assert away[0] == 503
    assert away[1]["detail"]
    # Only a refusal without an attempt to wait is that fast.
    assert took_s < 1
    assert "x 503" in active.output
    shown = [str(p)[:8] for p in before[1]["probabilities"] if p is not None]
    transcript = (folder / "runs" / "small" / "active" / "serve" / "transcript.jsonl").read_text()
    assert not [text for text in shown if text in active.output or text in transcript]


def test_serving_ends_with_a_clear_error_if_an_address_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with serving(folder, free_address(), address) as active:
            assert active.wait() == 2, active.output
    assert "serving.http: cannot serve at" in active.output
