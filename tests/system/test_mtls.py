"""The real processes with certificates: who trains, who is refused, and what the logs say."""

import socket
from contextlib import ExitStack
from pathlib import Path

from splitveil.deploy.authority import PartyFolder
from tests.support.certificates import make, use
from tests.support.processes import Pair, Party
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


def test_the_local_launcher_makes_certificates_where_an_example_has_none(
    compared: LocalRun,
) -> None:
    assert compared.exit_code == 0, compared.output
    assert compared.output.count("security: mtls as CN=") == 2 * 2
    authority = compared.runs_dir / ".trial-certificates"
    assert PartyFolder(authority / "active").certificate.is_file()
