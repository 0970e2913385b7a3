"""Runs that exchange each row once: what is sent, charged, refused, and resumed."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitveil.common.errors import Interrupted
from splitveil.library.recorded import clear_engine
from tests.support import simulation
from tests.support.peers import DiesAt, Lost
from tests.support.runs import Parties, build_parties, run_in_process, write_example

ONE_SHOT = ("contract.exchange=one_shot",)
PCA = "bottom_model={kind: pca}"
NOISY = (*ONE_SHOT, "contract.noisy_labels=true")
RELEASE = "defense={name: noisy_label, mechanism: {kind: gaussian}, insecure_noise_seed: 7}"
SCORE = "bottom_model={kind: score}"


def one_shot(folder: Path, *, noisy: bool = True, runs: Path | None = None) -> Parties:
    both = NOISY if noisy else ONE_SHOT
    active = [*both, *([RELEASE] if noisy else [])]
    passive = [*both, SCORE if noisy else PCA, "adversary=null"]
    return build_parties(folder, active, passive, runs=runs)


def of_run(parties: Parties) -> dict[str, Tensor]:
    """Return all that a run leaves: both models, and each row's activation as it was received."""
    trainer = parties.session.lifecycle.answering.trainer
    assert trainer.memory is not None
    return parties.weights() | {"received": trainer.memory.state_dict()["values"]}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# ---- resuming ----


class Ends(DiesAt):
    """Ends at one of its messages: killed, or interrupted by its operator."""

    error: type[BaseException] = Lost

    def _maybe_die(self, *, after: bool) -> None:
        if after is self.after and self._calls == self.at:
            raise self.error


@pytest.mark.parametrize(("noisy", "places"), [(False, (2,)), (True, range(1, 7))])
def test_a_run_that_ends_at_any_message_resumes_with_the_same_bits(
    tmp_path: Path, noisy: bool, places: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passive party is interrupted or killed, and both of them once more in what is left."""
    monkeypatch.setattr(simulation, "build_engine", clear_engine)
    write_example(tmp_path, rows=160)
    whole = one_shot(tmp_path, noisy=noisy)
    run_in_process(whole)
    expected, bounds = of_run(whole), whole.session.leak_bounds()
    assert whole.session.lifecycle.answering.batch_number == (6 if noisy else 4)
    for at in places:
        for error, after in ((Interrupted, False), (Lost, True)):
            runs = tmp_path / f"runs-{at}-{after}"
            peer = type("Ending", (Ends,), {"at": at, "after": after, "error": error})
            first = one_shot(tmp_path, noisy=noisy, runs=runs)
            with pytest.raises(error):
                run_in_process(first, peer)
            both = one_shot(tmp_path, noisy=noisy, runs=runs)
            if error is Lost:
                both.session = first.session
            else:
                both.session.reopen()
            killed = type("Killed", (Ends,), {"at": 1, "after": not after})
            with suppress(Lost):  # a run that is over asks nothing
                run_in_process(both, killed)
            resumed = one_shot(tmp_path, noisy=noisy, runs=runs)
            resumed.session.reopen()
            run_in_process(resumed)
            assert_equal(of_run(resumed), expected)
            assert resumed.session.leak_bounds() == bounds
