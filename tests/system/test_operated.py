"""Parties as their operators have them: status endpoints and JSON logs of real processes."""

import json
import re
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support import unit_sandbox
from tests.support.processes import Pair, started
from tests.support.runs import write_example
from tests.support.simulation import free_address
from tests.support.waiting import wait_until
from tests.support.watched import asked

LONG = "contract.epochs=100000"
JSON = "log_format=json"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Return a folder of one test's own: an unfinished run of another one would be resumed."""
    write_example(tmp_path)
    return tmp_path


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def stage_at(address: str) -> str:
    try:
        _, text = asked(address, "/healthz")
    except OSError:
        return "not there"
    stage: str = json.loads(text)["stage"]
    return stage


def steps_at(address: str) -> float:
    _, text = asked(address, "/metrics")
    (found,) = re.findall(r"^splitveil_steps_total (\S+)$", text, re.MULTILINE)
    return float(found)


def test_every_line_is_an_object_and_no_word_of_the_passive_party_is_of_labels(
    example: Path,
) -> None:
    """Its words, not its figures: those of the adversary are in files of its own."""
    with started(example, JSON, passive=["adversary=null"]) as pair:
        assert pair.wait() == (0, 0), pair.outputs
        for party in pair:
            lines = lines_of(party.output)
            times = [datetime.fromisoformat(line["time"]) for line in lines]
            assert times == sorted(times)
            assert {line["party"] for line in lines} == {party.party}
            assert {line["run"] for line in lines} == {"small"}
            assert any(line["message"] == "summary" and line["steps"] > 0 for line in lines)
        active, passive = (
            {line["run_id"] for line in lines_of(party.output) if "run_id" in line}
            for party in pair
        )
        fields = {name for line in lines_of(pair.passive.output) for name in line}
    assert active == passive
    assert len(active) == 1
    assert not {name for name in fields if re.search("label|loss|auc|leak|ledger", name)}


@pytest.mark.skipif(not unit_sandbox.CAN_FILTER, reason="needs systemd-analyze and libseccomp")
def test_both_parties_run_under_the_filters_of_their_units(example: Path) -> None:
    with started(example, as_unit=True) as pair:
        assert pair.wait() == (0, 0), pair.outputs


class Watching:
    """The addresses of both endpoints."""

    def __init__(self) -> None:
        self.active, self.passive = free_address(), free_address()

    def both(
        self, folder: Path, *shared: str, active: Sequence[str] = ()
    ) -> AbstractContextManager[Pair]:
        """Start both parties with their endpoints."""
        own = [f"status={self.active}", *active]
        return started(folder, *shared, active=own, passive=[f"status={self.passive}"])


def wait_for_steps(pair: Pair, address: str) -> None:
    """Wait until a party has done some steps, unless it ends before that."""
    pair.passive.wait_until(lambda: stage_at(address) == "training", "training")
    pair.passive.wait_until(lambda: steps_at(address) > 3, "steps")


def test_operators_see_a_run_its_loss_of_a_peer_and_its_return(example: Path) -> None:
    watching = Watching()
    with watching.both(example, LONG, JSON) as pair:
        for address in (watching.active, watching.passive):
            wait_for_steps(pair, address)
            assert asked(address, "/readyz")[0] == 200
        pair.active.kill()
        # The passive party says so, and lives.
        wait_until(lambda: asked(watching.passive, "/readyz")[0] == 503)
        assert "does not answer" in asked(watching.passive, "/readyz")[1]
        assert asked(watching.passive, "/healthz")[0] == 200
        pair.passive.signal(signal.SIGTERM)
        assert pair.passive.wait() == 143
        assert any(
            "stopping after this step" in line["message"] for line in lines_of(pair.passive.output)
        )


def test_the_active_party_is_ready_before_and_without_a_peer(example: Path) -> None:
    """A supervisor that lets nobody through to a party that is not ready would part the two."""
    watching = Watching()
    with watching.both(example, LONG) as pair:
        wait_for_steps(pair, watching.active)
        pair.passive.kill()
        connected = 'splitveil_peer_connected{peer="passive"} 0.0'
        wait_until(lambda: connected in asked(watching.active, "/metrics")[1])
        code, text = asked(watching.active, "/readyz")
        assert (code, json.loads(text)["reason"]) == (200, "serving")
