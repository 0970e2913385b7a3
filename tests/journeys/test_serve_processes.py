"""The real commands for online predictions: a passive party that is killed and comes back."""

import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from splitveil.simulation import free_address
from tests.certificates import make, use
from tests.runs import write_example
from tests.system.processes import Party, started
from tests.waiting import wait_until
from tests.watched import asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that has trained, over mutual TLS."""
    folder = tmp_path_factory.mktemp("trained")
    write_example(folder)
    use(make(folder / "certificates"), folder)
    with started(folder) as pair:
        assert pair.wait() == (0, 0), pair.outputs
    return folder


def passive_at(folder: Path, address: str, *more: str) -> Party:
    passive = Party("passive", folder, f"answers.listen={address}", *more, command="serve")
    passive.wait_until_says("waiting for the active party")
    return passive


def told(address: str, ids: list[str]) -> tuple[int, dict[str, Any]]:
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
    inner, outer = free_address(), free_address()
    own, other = free_address(), free_address()
    ids = [f"person-{number:05d}" for number in range(100, 116)]
    first = passive_at(folder, inner, f"status={other}")
    active = Party(
        "active",
        folder,
        f"inference.connect.passive={inner}",
        f"serving.http={outer}",
        f"status={own}",
        command="serve",
    )
    try:
        active.wait_until_says("answering at http://")
        before = told(outer, ids)
        assert asked(own, "/readyz")[0] == asked(other, "/readyz")[0] == 200
        assert 'embed_requests_total{call="Embed"} 1.0' in asked(other, "/metrics")[1]
        first.kill()
        began = time.monotonic()
        away = told(outer, ids)
        took_s = time.monotonic() - began
        assert asked(own, "/readyz")[0] == 503
        assert 'outcome="unavailable"} 1.0' in asked(own, "/metrics")[1]
        second = passive_at(folder, inner)
        try:
            wait_until(lambda: told(outer, ids)[0] == 200)
            assert told(outer, ids) == before
            active.signal(signal.SIGTERM)
            assert active.wait() == 0, active.output
        finally:
            second.kill()
    finally:
        first.kill()
        active.kill()
    assert before[0] == 200
    assert away[0] == 503
    assert away[1]["detail"]
    # The second, which only a refusal without an attempt to wait can keep.
    assert took_s < 1
    assert "x 503" in active.output
    shown = [str(p)[:8] for p in before[1]["probabilities"] if p is not None]
    transcript = (folder / "runs" / "small" / "active" / "serve" / "transcript.jsonl").read_text()
    assert not [text for text in shown if text in active.output or text in transcript]


def test_serving_ends_with_a_clear_error_if_an_address_is_taken(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        active = Party(
            "active",
            folder,
            f"inference.connect.passive={free_address()}",
            f"serving.http={address}",
            command="serve",
        )
        try:
            assert active.wait() == 2, active.output
        finally:
            active.kill()
    assert "serving.http: cannot serve at" in active.output
