"""A run that counts the charges of earlier runs: its ledger, budget and own account book."""

import io
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from splitveil.active_party.defenses.exact_auc import (
    auc_of_epsilon,
    gaussian_auc,
    gaussian_of_epsilon,
)
from splitveil.active_party.ledger.earlier_ledgers import LEDGER
from splitveil.active_party.plan import print_plan
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import BudgetExhausted, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.storage.model_files import save_tensors
from tests.peers import Lost, dying
from tests.runs import Parties, build_parties, run_in_process, write_example

MARVELL = "defense={name: marvell, strength: {power_ratio: 16}, insecure_noise_seed: 1}"
EVERY_2 = "contract.checkpoints.every_steps=2"
AFTER_FIRST = "earlier_ledgers=[first/active/checkpoint]"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data and with the ledger of a first run."""
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
    save_tensors(folder / "active", LEDGER, parties.session.account_book().state_dict())


def divergences(parties: Parties) -> dict[str, float]:
    """Return the divergence charged for each example's label, by id."""
    rows, session = parties.active.rows, parties.session
    assert rows is not None
    return {
        session.ids[row]: session.answering.budget.accounts.course.bounds(np.array([at])).sum_kl.max
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
        f"run_budget={{sum_kl: {limit}, covers: knows class means only}}" for limit in (0.2, 0.13)
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


def test_noise_that_is_kept_over_runs_tells_no_more_the_secondtime(
    example: Path, tmp_path: Path
) -> None:
    """The same key and strength repeat the answers of the first run; another strength adds."""
    kept = "defense={name: marvell, noise: persistent, insecure_noise_seed: 1}"
    leave(run(example, kept), tmp_path / "kept")
    after = f"earlier_ledgers=[{tmp_path / 'kept/active/checkpoint'}]"
    assert max(divergences(run(example, kept, after)).values()) == 0.25
    other = kept[:-1] + ", strength: {power_ratio: 16}}"
    assert max(divergences(run(example, other, after)).values()) == 0.25 + 1 / 16


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
    assert both.guarantee.max == pytest.approx(min(auc_of_epsilon(0.81), gaussian_auc(mu)))
    assert "all 2 epochs fit" in plan_of(example, once, limit)
    assert "all 2 epochs fit" not in plan_of(example, once, limit, after)
    assert "all 2 epochs fit" in plan_of(example, once, "run_budget={leak_auc: 0.7}", after)


def plan_of(folder: Path, *overrides: str) -> str:
    planned = settings(folder, *overrides)
    console = Console(file=(printed := io.StringIO()), width=250)
    print_plan(planned, PartyData.load(planned.data, folder), None, console)
    return printed.getvalue()


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
        run(example, MARVELL).session.answering.budget.accounts.course.state_dict(),
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


def test_the_plan_says_what_was_told_before(example: Path) -> None:
    """Two answers of each example, whose charges depend on the gradients in their later digits."""
    console = Console(file=io.StringIO(), width=200)
    planned = settings(example, AFTER_FIRST)
    print_plan(planned, PartyData.load(planned.data, example), None, console)
    assert isinstance(console.file, io.StringIO)
    said = re.search(
        r"What earlier_ledgers have told comes on top, sum_kl (\S+) at most, "
        r"bounded for a peer that knows class means only\.",
        console.file.getvalue(),
    )
    assert said is not None
    told = planned.earlier_answers().most()
    assert told == pytest.approx(2 / 16, rel=0.02)
    assert told <= float(said[1]) <= told * (1 + 1e-3)
