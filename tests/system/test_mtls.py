"""The real processes with certificates: who trains, who is refused, and what the logs say."""

import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from splitveil.deploy.authority import PartyFolder
from tests.support.certificates import make, use
from tests.support.processes import Pair, Party, side_by_side, started
from tests.support.runs import write_example
from tests.support.simulation import free_address
from tests.system.conftest import LocalRun


def protected_example(folder: Path) -> Path:
    write_example(folder)
    use(make(folder / "certificates"), folder)
    return folder


def test_silent_strangers_take_no_descriptor_that_a_run_needs(tmp_path: Path) -> None:
    folder, address, limit = protected_example(tmp_path), free_address(), 256
    host, port = address.split(":")
    with ExitStack() as stack:

        def connect_strangers() -> None:
            for _ in range(limit + 200):
                stack.enter_context(socket.create_connection((host, int(port))))

        epochs = "contract.epochs=40"
        active = Party("active", folder, f"listen={address}", epochs, descriptors=limit)
        stack.enter_context(active).wait_until_says("waiting for the passive party")
        connect_strangers()
        passive = stack.enter_context(Party("passive", folder, f"connect={address}", epochs))
        pair = Pair(active, passive)
        pair.wait_until_training()
        connect_strangers()
        assert active.exit_code is None, pair.outputs
        assert pair.wait() == (0, 0), pair.outputs


def given_up(folder: Path, *active: str) -> Pair:
    """Run a passive party that gives up, and then stop the active one."""
    with started(folder, active=active, in_turn=True) as pair:
        assert pair.passive.wait() == 4, pair.outputs
        pair.active.signal(signal.SIGTERM)
        assert pair.active.wait() == 143, pair.outputs
    return pair


def test_each_refusal_is_at_once_and_one_line(tmp_path: Path) -> None:
    def other_authority(folder: Path) -> Pair:
        protected_example(folder)
        use_active(make(folder / "foreign"), folder)
        return given_up(folder)

    def other_name(folder: Path) -> Pair:
        protected_example(folder)
        return given_up(folder, "contract.identities={passive: somebody.example}")

    def open_key(folder: Path) -> Pair:
        protected_example(folder)
        PartyFolder(folder / "certificates" / "active").private_key.chmod(0o644)
        PartyFolder(folder / "certificates" / "passive").certificate.unlink()
        with started(folder) as pair:
            assert pair.wait() == (2, 2), pair.outputs
        return pair

    cases: list[Callable[[], Pair]] = [
        lambda: other_authority(tmp_path / "authority"),
        lambda: other_name(tmp_path / "name"),
        lambda: open_key(tmp_path / "key"),
    ]
    authority, name, key = side_by_side(*cases)
    (line,) = problems(authority.passive)
    assert line.endswith(
        "the peer's certificate is not signed by any authority in security.authority"
    )
    (line,) = problems(name.passive)
    assert line.endswith("ERROR the peer does not accept this party's certificate")
    refusals = [text for text in problems(name.active) if "refused" in text]
    assert len(refusals) == 1
    assert "with certificate CN=passive.splitveil: it does not carry the name of any" in refusals[0]
    (line,) = problems(key.active)
    assert "private_key.pem has mode 0644, so that others may read it: chmod 600 " in line
    (line,) = problems(key.passive)
    assert "security.certificate: " in line
    assert "certificate.pem: there is no " in line


def use_active(certificates: Path, folder: Path) -> None:
    """Give the active party other certificates, and leave the passive party its own."""
    passive = (folder / "passive.yaml").read_text()
    use(certificates, folder)
    (folder / "passive.yaml").write_text(passive)


def problems(party: Party) -> list[str]:
    """Return its warnings and errors, those aside that a test's settings bring with them."""
    return [
        line
        for line in party.output.splitlines()
        if (" WARNING " in line or " ERROR " in line) and "insecure_nonce_seed" not in line
    ]


def test_check_shows_each_party_s_own_certificate(tmp_path: Path) -> None:
    folder = protected_example(tmp_path)

    def check(party: Party) -> str:
        assert party.wait() == 0, party.output
        return party.output

    active, passive = side_by_side(
        lambda: check(Party("active", folder, command="check")),
        lambda: check(Party("passive", folder, command="check")),
    )
    assert "ok: security: mtls as CN=active.splitveil (active.splitveil), 89 days" in active
    assert "security: mtls as CN=passive.splitveil (passive.splitveil), 89 days" in passive


def test_the_local_launcher_makes_certificates_where_an_example_has_none(
    compared: LocalRun,
) -> None:
    assert compared.exit_code == 0, compared.output
    assert compared.output.count("security: mtls as CN=") == 2 * 2
    authority = compared.runs_dir / ".trial-certificates"
    assert PartyFolder(authority / "active").certificate.is_file()
