"""A run with certificates on both sides, which are replaced while it goes on."""

from pathlib import Path

from splitveil.deploy.authority import renew_certificate
from tests.support.certificates import make, use
from tests.support.processes import started
from tests.support.runs import write_example


def test_a_run_continues_while_certificates_are_replaced(tmp_path: Path) -> None:
    write_example(tmp_path)
    use(make(tmp_path / "certificates"), tmp_path)
    with started(tmp_path, "contract.epochs=40") as pair:
        pair.wait_until_training()
        for party in ("active", "passive"):
            renew_certificate(tmp_path / "certificates", party, 10)
        assert pair.wait() == (0, 0), pair.outputs
    for process in pair:
        name = f"{process.party}.splitveil"
        assert f"security: mtls as CN={name} ({name}), 89 days left" in process.output
