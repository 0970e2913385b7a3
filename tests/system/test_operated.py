"""Parties as their operators have them: status endpoints and JSON logs of real processes."""

import json
import re
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support import unit_sandbox
from tests.support.endpoints import asked
from tests.support.processes import Pair, started
from tests.support.runs import write_example
from tests.support.simulation import free_address
from tests.support.waiting import wait_until

LONG = "contract.epochs=100000"
JSON = "--log-format=json"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a run under the filters of the units, where this machine has them."""
    folder = tmp_path_factory.mktemp("ended")
    write_example(folder)
    own = ["adversary=null"]
    with started(folder, JSON, passive=own, as_unit=unit_sandbox.CAN_FILTER) as pair:
        pair.wait()
        return pair


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


def test_every_line_is_an_object_and_no_word_of_the_passive_party_is_of_labels(ended: Pair) -> None:
    """Its words, not its figures: those of the adversary are in files of its own."""
    for party in ended:
        lines = lines_of(party.output)
        times = [datetime.fromisoformat(line["time"]) for line in lines]
        assert times == sorted(times)
        assert {line["party"] for line in lines} == {party.party}
        assert {line["run"] for line in lines} == {"small"}
        assert any(line["message"] == "summary" and line["steps"] > 0 for line in lines)
    active, passive = (
        {line["run_id"] for line in lines_of(party.output) if "run_id" in line} for party in ended
    )
    fields = {name for line in lines_of(ended.passive.output) for name in line}
    assert active == passive
    assert len(active) == 1
    assert not {name for name in fields if re.search("label|loss|auc|leak|ledger", name)}


@pytest.mark.skipif(not unit_sandbox.CAN_FILTER, reason="needs systemd-analyze and libseccomp")
def test_both_parties_run_under_the_filters_of_their_units(ended: Pair) -> None:
    assert ended.wait() == (0, 0), ended.outputs


def test_operators_see_a_run_the_loss_of_either_peer_and_its_return(tmp_path: Path) -> None:
    """A supervisor that lets nobody through to a party that is not ready would part the two."""
    write_example(tmp_path)
    addresses = active, passive = free_address(), free_address()
    own = ([f"status={address}"] for address in addresses)
    with started(tmp_path, LONG, JSON, active=next(own), passive=next(own)) as pair:

        def wait_for_steps() -> None:
            for address in addresses:
                pair.passive.wait_until(lambda: stage_at(address) == "training", "training")  # noqa: B023
                pair.passive.wait_until(lambda: steps_at(address) > 3, "steps")  # noqa: B023
                assert asked(address, "/readyz")[0] == 200

        wait_for_steps()
        pair.passive.kill()
        connected = 'splitveil_peer_connected{peer="passive"} 0.0'
        wait_until(lambda: connected in asked(active, "/metrics")[1])
        code, text = asked(active, "/readyz")
        assert (code, json.loads(text)["reason"]) == (200, "serving")
        pair.passive.start()
        wait_for_steps()
        pair.active.kill()
        # The passive party says so, and lives.
        wait_until(lambda: asked(passive, "/readyz")[0] == 503)
        assert "does not answer" in asked(passive, "/readyz")[1]
        assert asked(passive, "/healthz")[0] == 200
        pair.passive.signal(signal.SIGTERM)
        assert pair.passive.wait() == 143
        assert any(
            "stopping after this step" in line["message"] for line in lines_of(pair.passive.said)
        )
