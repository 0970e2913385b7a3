"""Runs that wait for their peers at the same time count each other, whoever connects first."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pytest

from splitveil.active_party.assembly import build_session
from splitveil.active_party.earlier_runs import counting
from splitveil.active_party.ledger.account_book import LEDGER, AccountBook
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.trainer_builder import TrainerBuilder
from splitveil.common.errors import BudgetExhausted, SettingsError, SplitveilError, StorageError
from splitveil.common.party.command_line import save_resolved
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.model_files import save_tensors
from splitveil.common.record.run_folder import claimed
from splitveil.common.record.run_store import RunStore
from splitveil.library.in_process import InProcessPeer
from tests.support.peers import Lost, dying
from tests.support.runs import CPU, Parties, build_parties, write_example
from tests.support.simulation import ActiveRecording

RELEASE = 2 * 0.405 * math.tanh(0.405 / 2)
"""The symmetrised divergence of a label that is kept with probability p, which has odds of
exp(0.405), and else flipped: (p - q) log (p / q), for each of the two values that may come out."""

QUICK = (
    "contract.epochs=1",
    "contract.batch_size=32",
    "contract.checkpoint_steps=1",
    "defense={name: noisy_label, mechanism: {kind: randomized_response, epsilon: 0.405}}",
    "leak_monitor=null",
)


class Waiting(NamedTuple):
    """A run whose process has counted the earlier ones, and waits for its peer."""

    name: str
    folder: Path
    parties: Parties
    session: ActiveSession
    store: RunStore

    def meet(self, peer: Callable[..., InProcessPeer] = InProcessPeer) -> None:
        self.parties.run.run(peer(self.session, self.parties.engine))

    def charged(self) -> float:
        """Return the charge of its answers about a row, as its log has them."""
        by_noise: dict[bytes, float] = {}
        if (self.folder / "checkpoint" / "answered.log").exists():
            for record in self.store.answers().since(0):
                charge = record.charge
                before = by_noise.get(charge.noise_identity, 0.0)
                by_noise[charge.noise_identity] = max(before, charge.sum_kl)
        return sum(by_noise.values())

    def leave(self) -> None:
        book = self.session.lifecycle.account_book()
        save_tensors(self.folder, LEDGER, book.state_dict())


@contextmanager
def started(example: Path, runs: Path, name: str, *overrides: str) -> Iterator[Waiting]:
    """Start a run as its process does, up to the waiting; in the end the process has ended."""
    own = [*QUICK, f"runs_dir={runs}", f"contract.run_name={name}", *overrides]
    parties = build_parties(example, own, ["adversary=null", *(o for o in own if "contract." in o)])
    settings, folder = parties.active_settings, runs / name / "active"
    with claimed(folder, "runs already"):
        folder.mkdir(exist_ok=True)
        save_resolved(settings, folder)
        data, count = PartyData.of(settings), partial(counting, settings, folder)
        builder = TrainerBuilder(settings, data, CPU)
        with count(AccountBook.empty()) as earlier:
            pass
        store = RunStore(folder, keep=3)
        nonce = lambda: name.encode().ljust(32, b".")  # noqa: E731
        session = build_session(
            settings, data, builder, ActiveRecording(), nonce, store, earlier, count
        )
        session.reopen()
        yield Waiting(name, folder, parties, session, store)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder, rows=80)
    return folder


ORDERS = [
    pytest.param(order, id="".join(order), marks=[] if order == tuple("dbca") else pytest.mark.slow)
    for order in permutations("abcd")
]


@pytest.mark.parametrize("order", ORDERS)
def test_a_budget_holds_for_all_runs_that_wait_together_in_every_order_of_connecting(
    example: Path, tmp_path: Path, order: Sequence[str]
) -> None:
    """It pays for two of the four."""
    budget, ended = f"run_budget={{sum_kl: {2.5 * RELEASE}}}", []
    processes = {name: ExitStack() for name in "abcd"}
    waiting = {
        name: process.enter_context(started(example, tmp_path, name, budget))
        for name, process in processes.items()
    }
    for name in order:
        with processes[name], suppress(BudgetExhausted):
            waiting[name].meet()
            ended.append(name)
        waiting[name].leave()
    charged = {name: run.charged() for name, run in waiting.items()}
    assert charged == {name: pytest.approx(RELEASE) if name in order[:2] else 0 for name in "abcd"}
    assert ended == [*order[:2]]


def test_of_two_runs_that_wait_the_second_is_refused_while_the_first_goes_on(
    example: Path, tmp_path: Path
) -> None:
    """Killed, the first counts with what it has answered, and is not resumed after the second."""
    with started(example, tmp_path, "b") as second:
        with started(example, tmp_path, "a") as first:
            with pytest.raises(Lost):
                first.meet(dying(2, after=True))
            with pytest.raises(SettingsError, match=rf"{first.folder}: .* wait for its end"):
                second.meet()
            assert second.charged() == 0
        assert first.charged() == pytest.approx(RELEASE)
    with started(example, tmp_path, "b") as second, started(example, tmp_path, "c") as third:
        assert second.session.lifecycle.account_book().worst().sum_kl == pytest.approx(RELEASE)
        with pytest.raises(Lost):
            second.meet(dying(2, after=True))
        with (
            pytest.raises(SettingsError, match=rf"{second.folder}: .* wait for its end"),
            started(example, tmp_path, "a"),
        ):
            pass
        with pytest.raises(SettingsError, match=rf"{second.folder}: .* wait for its end"):
            third.meet()
    with (
        pytest.raises(SettingsError, match="other runs have charged answers"),
        started(example, tmp_path, "a"),
    ):
        pass
    with started(example, tmp_path, "b") as again:
        book = again.session.lifecycle.account_book()
        assert book.worst().sum_kl == pytest.approx(2 * RELEASE)


@pytest.mark.parametrize("step", ["save_run", "new_answers", "save"])
def test_a_run_that_is_killed_while_it_begins_holds_up_nobody_and_counts_again(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def killed(*_: object) -> None:
        raise StorageError("in the place of kill -9")

    with started(example, tmp_path, "b") as first, started(example, tmp_path, "c") as second:
        with monkeypatch.context() as patch:
            patch.setattr(first.store, step, killed)
            with pytest.raises(SplitveilError):
                first.meet()
        if step != "save_run":  # its process is alive, and its run has begun
            with pytest.raises(SettingsError, match=rf"{first.folder}: .* wait for its end"):
                second.meet()
    with started(example, tmp_path, "c") as second:
        second.meet()
        second.leave()
    assert second.charged() == pytest.approx(RELEASE)
    with started(example, tmp_path, "b") as first:
        first.meet()
        assert first.session.leak_bounds().sum_kl.max == pytest.approx(2 * RELEASE)
