"""Both parties are killed in a run over mutual TLS, and the same commands end it bit for bit."""

from pathlib import Path

from splitveil.deploy.authority import renew_certificate
from tests.support.certificates import make, use
from tests.support.restarts import SHORT, assert_same, outcome, restartable, run_once, wait_for_line
from tests.support.runs import write_example

SETTINGS = SHORT._replace(
    both=(*SHORT.both, "contract.epochs=3"),
    active=("defense={name: marvell, noise: persistent, insecure_noise_seed: 7}",),
)


def test_killed_parties_resume_with_new_certificates_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    whole = run_once(tmp_path / "whole", SETTINGS)  # without TLS, which changes no bit
    folder = tmp_path / "killed"
    write_example(folder)
    use(make(folder / "certificates"), folder)
    with restartable(folder, SETTINGS) as both:
        both.start()
        wait_for_line(both, len(whole.metrics["active"]) // 3)
        for party in both:
            party.kill()
            renew_certificate(folder / "certificates", party.party, 10)
        both.start()
        assert both.wait() == (0, 0), both.outputs
        for party in both:
            name = f"{party.party}.splitveil"
            for days in (89, 9):
                assert f"security: mtls as CN={name} ({name}), {days} days left" in party.output
            assert "resuming in epoch" in party.said
        assert_same(outcome(folder / "runs"), whole, both.outputs)
    assert not list((folder / "runs" / "small").glob("*.previous-*"))
