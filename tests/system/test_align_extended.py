"""``align`` with kept keys, by the commands: new ids at their own cost, killed, with several."""

import re
from contextlib import ExitStack
from pathlib import Path

from splitveil.common.wire.limits import CHUNK_IDS, POINT_BYTES
from splitveil.simulation import free_address
from tests.runs import write_example
from tests.several import NAMES, write_several
from tests.system.forked import Forked
from tests.system.processes import Pair, Party, PartyName
from tests.system.test_align_command import aligning_both, rows_of
from tests.system.test_align_resumed import kept_bytes
from tests.waiting import HANGS_AFTER_S, wait_until

KEEPING = "contract.alignment.keep_key=true"
IN_EARNEST = "insecure_nonce_seed=null"  # a new nonce per alignment


def check_outputs(folder: Path, names: tuple[str, ...] = ("active", "passive")) -> None:
    """Compare the outputs with the common ids of the tables."""
    orders = [[row["id"] for row in rows_of(folder / f"{name}_out.csv")] for name in names]
    tables = [{row["id"] for row in rows_of(folder / f"{name}.csv")} for name in names]
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == sorted(set.intersection(*tables))


def said_new(output: str) -> list[int]:
    """Return the numbers in the line that says how many ids are new."""
    line = re.search(
        r"new since the last alignment: (\d+) of (\d+) own ids, (\d+) of (\d+) of the", output
    )
    return [int(number) for number in line.groups()] if line else []


def align_twice(folder: Path, *second: str) -> Pair:
    with aligning_both(folder, KEEPING, IN_EARNEST) as pair:
        assert pair.wait() == (0, 0), pair.outputs
    check_outputs(folder)
    write_example(folder, rows=330)
    with aligning_both(folder, KEEPING, IN_EARNEST, *second) as pair:
        assert pair.wait() == (0, 0), pair.outputs
    check_outputs(folder)
    return pair


def test_a_second_alignment_exchanges_what_is_new(tmp_path: Path) -> None:
    """The first 15 ids of 300 are the active party's alone, then the first 16 of 330."""
    write_example(tmp_path, rows=300)
    pair = align_twice(tmp_path)
    assert [said_new(party.output) for party in pair] == [[29, 314, 30, 314], [30, 314, 29, 314]]
    for name, peer in (("active", "passive"), ("passive", "active")):
        keys = tmp_path / "alignment-keys" / name
        files = sorted(path.suffix for path in (keys / f"{peer}.splitveil").iterdir())
        assert files == ["", ".own", ".peer"]
        for path in (keys, *keys.rglob("*")):
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
        assert (keys / "tried-ids").exists()
    assert not list((tmp_path / "runs").rglob("state"))


def test_another_folder_of_keys_begins_anew_and_says_so(tmp_path: Path) -> None:
    write_example(tmp_path, rows=300)
    pair = align_twice(tmp_path, "alignment_keys=others")
    for party in pair:
        assert "all ids are exchanged: no key was kept before" in party.output


def test_a_training_run_extends_what_align_has_begun(tmp_path: Path) -> None:
    write_example(tmp_path, rows=300)
    with aligning_both(tmp_path, KEEPING) as pair:
        assert pair.wait() == (0, 0), pair.outputs
    write_example(tmp_path, rows=330)
    address = free_address()
    with ExitStack() as stack:
        where: dict[PartyName, str] = {"active": "listen", "passive": "connect"}
        parties = [
            Party(name, tmp_path, f"{place}={address}", KEEPING, "contract.epochs=1")
            for name, place in where.items()
        ]
        for party in parties:
            stack.callback(party.kill)
        assert Pair(*parties).wait() == (0, 0), [party.output for party in parties]
    assert said_new(parties[0].output) == [29, 314, 30, 314]
    with aligning_both(tmp_path, KEEPING) as pair:
        assert pair.wait() == (0, 0), pair.outputs
        assert [said_new(party.output) for party in pair] == [[0, 314, 0, 314]] * 2
    check_outputs(tmp_path)


def test_parties_that_are_killed_while_they_exchange_new_ids_resume_there(tmp_path: Path) -> None:
    write_example(tmp_path, rows=300)
    with aligning_both(tmp_path, KEEPING, IN_EARNEST) as pair:
        assert pair.wait() == (0, 0), pair.outputs
    write_example(tmp_path, rows=21_000)
    address = free_address()
    places: dict[PartyName, str] = {"active": f"listen={address}", "passive": f"connect={address}"}
    said: dict[PartyName, list[Party]] = {name: [] for name in places}

    with ExitStack() as stack:

        def start(name: PartyName) -> None:
            party = Party(
                name,
                tmp_path,
                places[name],
                KEEPING,
                IN_EARNEST,
                "alignment_memory_limit=32MB",
                command="align",
                options=["--output", str(tmp_path / f"{name}_out.csv")],
                log=f"again-{len(said[name])}",
            )
            stack.callback(party.kill)
            said[name].append(party)

        for name in places:
            start(name)
        for chunks, killed in enumerate(places, 1):
            least = chunks * CHUNK_IDS * POINT_BYTES
            wait_until(lambda: kept_bytes(tmp_path, killed, "peer.points") >= least)  # noqa: B023
            said[killed][-1].kill()
            start(killed)
        codes = {name: said[name][-1].wait() for name in places}
        outputs = {name: [party.output for party in said[name]] for name in places}
        assert set(codes.values()) == {0}, outputs

    check_outputs(tmp_path)
    for name in places:
        assert "resuming an exchange of ids" in outputs[name][-1], outputs
        assert said_new(outputs[name][-1]), outputs


def test_parties_of_which_one_alone_keeps_keys_refuse_each_other(tmp_path: Path) -> None:
    write_example(tmp_path, rows=120)
    address = free_address()
    with ExitStack() as stack:
        options = ["--output", str(tmp_path / "out.csv")]
        active = Party(
            "active", tmp_path, f"listen={address}", KEEPING, command="align", options=options
        )
        stack.callback(active.kill)
        passive = Party("passive", tmp_path, f"connect={address}", command="align", options=options)
        stack.callback(passive.kill)
        assert passive.wait() == 2, passive.output
        active.wait_until_says("contract.alignment.keep_key: ")


def test_several_parties_have_a_key_each(tmp_path: Path) -> None:
    names = ("active", *NAMES)
    address, runs = free_address(), ["--runs", str(tmp_path / "runs")]

    def align_all() -> dict[str, str]:
        with ExitStack() as stack:
            processes = []
            for name in names:
                program, place = (
                    ("active", "listen") if name == "active" else ("passive", "connect")
                )
                words = ["align", str(tmp_path / f"{name}.yaml"), *runs]
                for setting in (f"{place}={address}", KEEPING, IN_EARNEST):
                    words += ["--set", setting]
                output = ["--output", str(tmp_path / f"{name}_out.csv")]
                log = tmp_path / f"{name}.log"
                processes.append(Forked(f"splitveil.{program}_party", [*words, *output], log))
                stack.callback(processes[-1].kill)
            codes = {process.wait(HANGS_AFTER_S) for process in processes}
            said = {name: (tmp_path / f"{name}.log").read_text(encoding="utf-8") for name in names}
            assert codes == {0}, said
        return said

    write_several(tmp_path, parties=3, rows=400)
    align_all()
    check_outputs(tmp_path, names)
    write_several(tmp_path, parties=3, rows=440)
    said = align_all()
    check_outputs(tmp_path, names)
    for name in NAMES:
        new, of_own, _, _ = said_new(said[name])
        assert 0 < new < 100 < of_own
    assert len({path.name for path in (tmp_path / "alignment-keys" / "active").iterdir()}) == 4
