"""A run that counts the charges of earlier runs: its ledger, budget and own account book."""

import logging
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from splitveil.active_party import earlier_runs
from splitveil.active_party.assembly import build_session
from splitveil.active_party.defenses import Charge
from splitveil.active_party.defenses.dp_bounds import (
    auc_of_epsilon,
    gaussian_of_epsilon,
    leak_auc_of_mu,
)
from splitveil.active_party.earlier_runs import earlier_answers
from splitveil.active_party.ledger.account_book import LEDGER, AccountBook
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import BudgetExhausted, SettingsError
from splitveil.common.party.command_line import save_resolved
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.privacy.charge import Adversary
from splitveil.common.record.model_files import save_tensors
from splitveil.common.record.run_folder import claimed, move_aside
from splitveil.common.record.run_store import RunStore
from tests.support.peers import Lost, dying
from tests.support.plans import printed_plan
from tests.support.runs import EVERY_2, Parties, build_parties, run_in_process, write_example
from tests.support.simulation import ActiveRecording

MARVELL = "defense={name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 1}"
AFTER_FIRST = "earlier_ledgers=[first/active/checkpoint]"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    leave(run(folder, MARVELL), folder / "first")
    return folder


def parties_with(folder: Path, *active: str, runs: Path | None = None) -> Parties:
    contract = [one for one in active if one.startswith("contract.")]
    return build_parties(folder, active, contract, runs=runs)


def run(folder: Path, *active: str) -> Parties:
    parties = parties_with(folder, *active)
    run_in_process(parties)
    return parties


def leave(parties: Parties, folder: Path) -> None:
    (folder / "active").mkdir(parents=True)
    save_tensors(folder / "active", LEDGER, parties.session.lifecycle.account_book().state_dict())


def divergences(parties: Parties) -> dict[str, float]:
    rows, session = parties.active.rows, parties.session
    assert rows is not None
    return {
        session.ids[row]: session.lifecycle.answering.budget.course.bounds(
            np.array([at])
        ).sum_kl.max
        for at, row in enumerate(rows.file_rows)
    }


def test_each_example_begins_where_the_earlier_run_left_it(example: Path) -> None:
    """The split is another one in each run: so it is the id that counts, and not the place."""
    other = "insecure_nonce_seed=44"
    first, alone = run(example, MARVELL), run(example, MARVELL, other)
    after = run(example, MARVELL, other, AFTER_FIRST)
    before, expected = divergences(first), divergences(alone)
    found = divergences(after)
    assert found == pytest.approx({one: before[one] + expected[one] for one in expected})
    told_twice = [one for one in before if before[one] and expected[one]]
    told_before = [one for one in before if before[one] and not expected[one]]
    assert len(told_twice) > 50
    assert len(told_before) > 20
    assert max(found.values()) == pytest.approx(4 / 16, rel=0.02)
    assert after.active.earlier is not None
    examples, bounds = after.active.earlier
    assert examples == len(told_twice)
    assert bounds.sum_kl.max == pytest.approx(2 / 16, rel=0.02)
    assert alone.active.earlier is None


def test_a_budget_counts_earlier_runs_and_one_that_is_used_up_answers_nothing(
    example: Path,
) -> None:
    enough, used_up = (
        f"run_budget={{sum_kl: {limit}, adversary: knows class means only}}"
        for limit in (0.2, 0.13)
    )
    run(example, MARVELL, enough)
    parties = parties_with(example, MARVELL, enough, AFTER_FIRST)
    with pytest.raises(BudgetExhausted, match="epoch 2 step 1"):
        run_in_process(parties)
    run(example, MARVELL, used_up)
    parties = parties_with(example, MARVELL, used_up, AFTER_FIRST)
    with pytest.raises(BudgetExhausted, match="epoch 1 step 1"):
        run_in_process(parties)
    assert parties.active.sent == []


def test_two_earlier_ledgers_add_up_and_what_a_chain_charged_counts_once(
    example: Path, tmp_path: Path
) -> None:
    leave(run(example, MARVELL, AFTER_FIRST, "insecure_nonce_seed=44"), tmp_path / "second")
    leave(run(example, MARVELL, "insecure_nonce_seed=45"), tmp_path / "beside")
    first, second, beside = (
        folder / "active/checkpoint"
        for folder in (example / "first", tmp_path / "second", tmp_path / "beside")
    )

    def most(*folders: Path) -> float:
        names = ", ".join(map(str, folders))
        return max(divergences(run(example, MARVELL, f"earlier_ledgers=[{names}]")).values())

    assert most(second) == most(first, second) == pytest.approx(6 / 16, rel=0.02)
    assert most(first, first) == most(first) == pytest.approx(4 / 16, rel=0.02)
    assert most(beside, first) == pytest.approx(6 / 16, rel=0.02)


def test_a_validation_label_that_could_end_a_run_has_no_bound_in_the_next_one(
    example: Path,
) -> None:
    """A peer that ranks its row first and then last reads the label from the end of the run."""
    noisy = "defense={name: noisy_label, insecure_noise_seed: 1}"
    for stops, bound in (("null", 0.5), ("1", 1.0)):
        ended = run(example, noisy, f"early_stopping_epochs={stops}", "earlier_ledgers=[]")
        rows, ids = ended.active.rows, ended.session.ids
        assert rows is not None
        names = [ids[row] for row in rows.file_rows]
        begun = ended.session.lifecycle.account_book().opening_ledger(names, len(names))
        assert begun.bounds(rows.splits["validation"]).guarantee.max == bound
        assert begun.bounds(rows.splits["test"]).guarantee.max == 0.5
        assert begun.bounds(rows.splits["train"]).guarantee.max > 0.5


def test_a_label_that_another_run_draws_again_uses_up_the_budget_of_the_first(
    example: Path, tmp_path: Path
) -> None:
    """With the same key it is the same label; the plan does not know the key, and warns."""
    flips = "mechanism: {kind: randomized_response, epsilon: 0.405}"  # a leak AUC of .5999
    once, again = (
        f"defense={{name: noisy_label, {flips}, insecure_noise_seed: {seed}}}" for seed in (1, 2)
    )
    limit = "run_budget={leak_auc: 0.6}"
    after = f"earlier_ledgers=[{tmp_path / 'active' / 'checkpoint'}]"
    leave(run(example, once, limit), tmp_path)
    kept = run(example, once, limit, after)
    assert kept.session.leak_bounds().guarantee.max == pytest.approx(auc_of_epsilon(0.405))
    with pytest.raises(BudgetExhausted, match="epoch 1 step 1"):
        run(example, again, limit, after)
    both = run(example, again, after).session.leak_bounds()
    mu = math.sqrt(2) * gaussian_of_epsilon(0.405)
    assert both.guarantee.max == pytest.approx(min(auc_of_epsilon(0.81), leak_auc_of_mu(mu)))
    assert "all 2 epochs fit" in printed_plan(example, MARVELL, once, limit)
    assert "all 2 epochs fit" not in printed_plan(example, MARVELL, once, limit, after)
    assert "all 2 epochs fit" in printed_plan(
        example, MARVELL, once, "run_budget={leak_auc: 0.7}", after
    )


def test_a_run_that_resumes_counts_earlier_ones_once(example: Path, tmp_path: Path) -> None:
    whole = run(example, MARVELL, AFTER_FIRST, EVERY_2)
    first = parties_with(example, MARVELL, AFTER_FIRST, EVERY_2, runs=tmp_path)
    with pytest.raises(Lost):
        run_in_process(first, dying(7, after=True))
    again = parties_with(example, MARVELL, AFTER_FIRST, EVERY_2, runs=tmp_path)
    again.session.reopen()
    run_in_process(again)
    assert again.active.resumed != []
    assert again.session.leak_bounds() == whole.session.leak_bounds()
    assert divergences(again) == divergences(whole)


def settings(folder: Path, *overrides: str) -> ActiveSettings:
    return load_party_settings(ActiveSettings, folder / "active.yaml", [MARVELL, *overrides])


def test_rows_that_only_have_numbers_do_not_have_accounts(example: Path) -> None:
    with pytest.raises(SettingsError, match=r"earlier_ledgers: needs data\.id_column"):
        settings(example, AFTER_FIRST, "data.id_column=null")


def test_a_run_that_has_left_no_ledger_is_refused(example: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no ledger.*start it again"):
        settings(example, "earlier_ledgers=[second/active/checkpoint]").earlier_answers()


def test_a_damaged_ledger_is_refused(example: Path, tmp_path: Path) -> None:
    whole = (example / "first" / "active" / "checkpoint" / LEDGER).read_bytes()
    broken = settings(example, f"earlier_ledgers=[{tmp_path}]")
    (tmp_path / LEDGER).write_bytes(whole[:200])
    with pytest.raises(SettingsError, match="cannot be read"):
        broken.earlier_answers()
    save_tensors(
        tmp_path,
        LEDGER,
        run(example, MARVELL).session.lifecycle.answering.budget.course.state_dict(),
    )
    with pytest.raises(SettingsError, match="whose accounts"):
        settings(example, f"earlier_ledgers=[{tmp_path / 'checkpoint'}]").earlier_answers()


def test_a_run_does_not_begin_with_its_own_ledger(example: Path) -> None:
    own = [f"runs_dir={example}", "contract.run_name=first", AFTER_FIRST]
    with pytest.raises(SettingsError, match="another run_name"):
        settings(example, *own).earlier_answers()
    aside = example / "first" / "active.previous-1" / "checkpoint"
    shutil.copytree(example / "first" / "active" / "checkpoint", aside)
    moved = "earlier_ledgers=[first/active.previous-1/checkpoint]"
    assert len(settings(example, *own[:2], moved).earlier_answers()) == 360


# ---- runs that no setting names ----


def left(runs: Path, name: str, parties: Parties, *, book: bool = True) -> Path:
    folder = runs / name
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    save_resolved(parties.active_settings, folder)
    if book:
        save_tensors(folder, LEDGER, parties.session.lifecycle.account_book().state_dict())
    return folder


def found(example: Path, runs: Path, *overrides: str, own: str = "new/active") -> AccountBook:
    start = settings(example, f"runs_dir={runs}", *overrides)
    return earlier_answers(start, runs / own, leaves_books=False)


def test_every_run_about_the_same_labels_counts_whatever_its_name_and_wherever_it_was_moved(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = run(example, MARVELL), run(example, MARVELL, "insecure_nonce_seed=44")
    left(tmp_path, "a/active", one)
    (tmp_path / "no run/active/checkpoint").mkdir(parents=True)  # as a noise key alone leaves it
    assert found(example, tmp_path).worst().sum_kl == pytest.approx(2 / 16, rel=0.02)
    assert len(found(example, tmp_path, own="a/active")) == 0
    assert len(found(example, tmp_path, "earlier_ledgers=[]")) == 0
    left(tmp_path, "new/active.previous-2", other)
    with caplog.at_level(logging.INFO):
        assert found(example, tmp_path).worst().sum_kl == pytest.approx(4 / 16, rel=0.02)
    for name in ("a/active", "new/active.previous-2"):
        assert re.search(rf"labels were released at .* in {tmp_path / name} \(20", caplog.text)
    after_a = f"earlier_ledgers=[{tmp_path / 'a/active/checkpoint'}]"
    left(tmp_path, "b/active", run(example, MARVELL, after_a, "insecure_nonce_seed=45"))
    assert found(example, tmp_path).worst().sum_kl == pytest.approx(6 / 16, rel=0.02)
    assert found(example, tmp_path, after_a).worst().sum_kl == pytest.approx(2 / 16, rel=0.02)
    assert len(found(example, tmp_path, "data.label_column=own1")) == 0


def test_a_run_that_is_moved_aside_while_others_are_counted_counts(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = run(example, MARVELL), run(example, MARVELL, "insecure_nonce_seed=44")
    left(tmp_path, "a/active", one)
    moving, book_in = left(tmp_path, "b/active", other), earlier_runs._book_in

    def meanwhile(folder: Path, *words: Any, **named: Any) -> AccountBook | None:
        if moving.exists():
            move_aside(moving)
        return book_in(folder, *words, **named)

    monkeypatch.setattr(earlier_runs, "_book_in", meanwhile)
    assert found(example, tmp_path).worst().sum_kl == pytest.approx(4 / 16, rel=0.02)


def test_a_run_that_charged_nothing_and_describes_few_peers_counts(
    example: Path, tmp_path: Path
) -> None:
    ledger = AccountBook.empty().opening_ledger(["person-00001"], 1)
    ledger.charge(np.array([0]), Charge(0.0, adversary=Adversary.CLASS_MEANS))
    book = AccountBook.empty().closing_book(["person-00001"], ledger).of_run("a")
    folder = left(tmp_path, "a/active", parties_with(example, MARVELL), book=False)
    save_tensors(folder, LEDGER, book.state_dict())
    assert found(example, tmp_path).worst().adversary is Adversary.CLASS_MEANS


def test_rows_without_ids_are_those_of_the_same_file(example: Path, tmp_path: Path) -> None:
    for party in ("active", "passive"):  # row n of one file is about the person of row n
        (example / f"{party}-of-rows.csv").write_bytes((example / f"{party}.csv").read_bytes())
    by_row = ["data.id_column=null", "data.source.path=active-of-rows.csv"]
    passive = ["data.id_column=null", "data.source.path=passive-of-rows.csv"]
    parties = build_parties(example, [MARVELL, *by_row], passive)
    run_in_process(parties)
    left(tmp_path, "a/active", parties)
    assert found(example, tmp_path, *by_row).worst().sum_kl == pytest.approx(2 / 16, rel=0.02)
    assert len(found(example, tmp_path, by_row[0])) == 0
    assert len(found(example, tmp_path)) == 0
    with pytest.raises(SettingsError, match=r"only one of the runs names examples by ids"):
        found(example, tmp_path, by_row[1])


@pytest.mark.parametrize("aside", [False, True])
def test_a_run_that_was_killed_counts_with_all_that_it_has_answered(
    example: Path, tmp_path: Path, *, aside: bool
) -> None:
    """Some of its answers are in its last state, others in its log only."""
    killed = parties_with(example, MARVELL, EVERY_2, runs=tmp_path / "a")
    with pytest.raises(Lost):
        run_in_process(killed, dying(4, after=True))
    charged = killed.session.lifecycle.account_book()
    folder = left(tmp_path, "a/active", killed, book=False)
    if aside:
        folder = folder.rename(folder.with_name("active.previous-1"))
    before = sorted(path for path in tmp_path.rglob("*") if path.name[0] != ".")
    book = found(example, tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.name[0] != ".") == before
    assert book.worst().sum_kl == charged.worst().sum_kl > 0
    assert book.runs == charged.runs
    assert not np.setdiff1d(book.names, charged.names).size
    start = settings(example, f"runs_dir={tmp_path}")
    assert earlier_answers(start, None, leaves_books=True).runs == charged.runs
    assert AccountBook.from_state(load_file(folder / "checkpoint" / LEDGER)).runs == charged.runs
    # From now on it cannot be resumed: the other run's answers would not be in its accounts.
    left(tmp_path, "b/active", run(example, MARVELL, f"earlier_ledgers=[{folder / 'checkpoint'}]"))
    again = build_session(
        killed.active_settings,
        PartyData.of(killed.active_settings),
        lambda _: pytest.fail("nothing is to be built"),
        ActiveRecording(),
        lambda: bytes(32),
        RunStore(folder, keep=3),
        found(example, tmp_path, own=f"a/{folder.name}"),
    )
    with pytest.raises(SettingsError, match=r"other runs have charged answers .* --fresh"):
        again.reopen()


def test_a_run_whose_charges_cannot_be_known_is_named_and_never_left_out(
    example: Path, tmp_path: Path
) -> None:
    killed = parties_with(example, MARVELL, EVERY_2, runs=tmp_path / "a")
    with pytest.raises(Lost):
        run_in_process(killed, dying(4, after=True))
    folder = left(tmp_path, "a/active", killed, book=False)

    def refused(reason: str, *overrides: str) -> None:
        with pytest.raises(SettingsError, match=rf"{folder}: .*counted: .*{reason}.*\[\] for none"):
            found(example, tmp_path, *overrides)

    with claimed(folder, ""):
        refused("wait for its end")
    log, text = folder / "checkpoint" / "answered.log", (folder / "settings.yaml").read_text()
    whole = log.read_bytes()
    log.write_bytes(whole[:-60] + bytes(60))
    refused("is damaged")
    log.write_bytes(whole)
    (folder / "settings.yaml").write_text(text[:100])
    refused("damaged")
    (folder / "settings.yaml").unlink()
    refused("there is no such file")
    (folder / "settings.yaml").write_text(text)
    refused("by other rules", "contract.ids=[{kind: text, fold_case: true}]")
    (folder / "checkpoint" / "run.state").unlink()
    refused("no ledger holds")
    (folder / "checkpoint" / LEDGER).write_bytes(b"{")
    refused("cannot be read")
    left(tmp_path, f"a/{folder.name}", killed)
    refused("knows the insecure_noise_seed of that run", "defense={name: marvell}")


def test_the_plan_says_what_was_told_before(example: Path) -> None:
    """Two answers of each example, whose charges depend on the gradients in their later digits."""
    said = re.search(
        r"What earlier runs have revealed comes on top, sum_kl (\S+) at most, a leak AUC of \S+, "
        r"bounded for a peer that knows class means only; what this run adds is not known before",
        printed_plan(example, MARVELL, AFTER_FIRST),
    )
    assert said is not None
    told = settings(example, AFTER_FIRST).earlier_answers().worst().sum_kl
    assert told == pytest.approx(2 / 16, rel=0.02)
    assert told <= float(said[1]) <= told * (1 + 1e-3)
