"""Processes that are killed while they exchange ids: both resume where they were."""

from contextlib import ExitStack
from pathlib import Path

from splitveil.common.alignment import ExchangeStores
from splitveil.common.wire.limits import CHUNK_IDS, POINT_BYTES
from tests.support.processes import Party, PartyName
from tests.support.runs import write_example
from tests.support.simulation import free_address
from tests.support.waiting import wait_until
from tests.system.test_align_command import rows_of

ROWS = 21_000
"""Five chunks of points at each party."""
PARTIES: tuple[PartyName, PartyName] = ("active", "passive")
PEERS = {"active": "passive", "passive": "active"}


def kept_bytes(folder: Path, party: str, name: str) -> int:
    """Return how much of one of its files a party has kept."""
    at = folder / "runs" / "small" / "alignment" / f".{party}.exchanges" / PEERS[party] / name
    return at.stat().st_size if at.exists() else 0


def test_parties_that_are_killed_resume_the_exchange_and_find_exactly_the_common_ids(
    tmp_path: Path,
) -> None:
    """The one that is killed first has a memory limit: its tags and its order are on disk."""
    write_example(tmp_path, rows=ROWS)
    address = free_address()
    places = {"active": f"listen={address}", "passive": f"connect={address}"}
    order: tuple[PartyName, PartyName] = ("passive", "active")
    limits = {"passive": "32MB", "active": "null"}
    said: dict[PartyName, list[Party]] = {name: [] for name in PARTIES}

    with ExitStack() as stack:

        def start(name: PartyName) -> None:
            party = Party(
                name,
                tmp_path,
                places[name],
                f"alignment_memory_limit={limits[name]}",
                "insecure_nonce_seed=null",  # as in earnest: a new one per alignment
                command="align",
                options=["--output", str(tmp_path / f"{name}_out.csv")],
                log=f"align-{len(said[name])}",
            )
            stack.callback(party.kill)
            said[name].append(party)

        for name in PARTIES:
            start(name)
        for chunks, killed in enumerate(order, 1):
            least = chunks * CHUNK_IDS * POINT_BYTES
            wait_until(lambda: kept_bytes(tmp_path, killed, "peer.points") >= least)  # noqa: B023
            assert (kept_bytes(tmp_path, killed, "order") > 0) == (killed == "passive")
            said[killed][-1].kill()
            start(killed)
        codes = {name: said[name][-1].wait() for name in PARTIES}
        outputs = {name: [party.output for party in said[name]] for name in PARTIES}
        assert set(codes.values()) == {0}, outputs

    for name in PARTIES:
        assert "resuming an exchange of ids" in outputs[name][-1], outputs
        assert not list((tmp_path / "runs").rglob("state")), "a secret is left"
    found = {name: [row["id"] for row in rows_of(tmp_path / f"{name}_out.csv")] for name in PARTIES}
    all_ids = [{row["id"] for row in rows_of(tmp_path / f"{name}.csv")} for name in PARTIES]
    assert found["active"] == found["passive"]
    assert len(found["active"]) == len(set(found["active"]))
    assert set(found["active"]) == set.intersection(*all_ids)


def test_starting_over_forgets_what_was_kept(tmp_path: Path) -> None:
    kept = ExchangeStores(tmp_path / "active")
    (tmp_path / ".active.exchanges" / "passive").mkdir(parents=True)
    (tmp_path / ".active.exchanges" / "passive" / "state").write_text("{}")
    kept.discard()
    assert not (tmp_path / ".active.exchanges").exists()
