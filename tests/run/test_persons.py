"""One-shot runs that bound all rows of a person together: attacks, charges, and bad input."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from scipy import stats
from torch import Tensor

from splitveil.active_party.commands.check import _data_and_bounds
from splitveil.active_party.defenses import NoisyLabelDefense, Secrets
from splitveil.active_party.defenses.dp_bounds import leak_auc_of_mu
from splitveil.active_party.defenses.interface import DefenseContext
from splitveil.active_party.ledger.account_book import LEDGER
from splitveil.active_party.planned import plan_of
from splitveil.active_party.trainer_builder import Persons
from splitveil.common.data.ids import read_subjects
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.model_files import save_tensors
from splitveil.library.simulating import simulate
from tests.run import test_noisy_sums
from tests.run.test_one_shot import NOISY, RELEASE, SCORE, released_to
from tests.support.runs import Parties, build_parties, run_in_process, write_example

RATIO = float(test_noisy_sums.RATIO)  # a leak AUC of .60
GROUPED = RELEASE.replace("}, ins", "}, subject_column: person, ins")
ROWS = 3  # of each person

small_messages = test_noisy_sums.small_messages
in_the_clear = test_noisy_sums.in_the_clear


def name_persons(path: Path, rows: int = ROWS, *, ids: str = "person-") -> None:
    """Add a column of persons to an example's table, each of whom has so many rows."""
    head, *lines = path.read_text().splitlines()
    cells = [line.split(",", 1) for line in lines]
    named = [f"{ids}{one[7:]},{rest},p{int(one[7:]) // rows}" for one, rest in cells]
    path.write_text("\n".join([f"{head},person", *named, ""]))


@pytest.fixture
def example(tmp_path: Path) -> Path:
    write_example(tmp_path, rows=160)
    name_persons(tmp_path / "active.csv")
    return tmp_path


def persons_run(
    folder: Path, *active: str, sums: bool = False, runs: Path | None = None
) -> Parties:
    both = test_noisy_sums.SUMS if sums else NOISY
    return build_parties(
        folder, [*both, GROUPED, *active], [*both, SCORE, "adversary=null"], runs=runs
    )


# ---- a peer that scores a person by all of its rows ----


def released(labels: Sequence[float], rows_of_person: int, num_classes: int = 2) -> Tensor:
    """Return what is sent of some rows' noisy labels, (rows, values)."""
    context = DefenseContext((4,), num_classes, is_one_shot=True, rows_of_person=rows_of_person)
    mechanism = {"kind": "gaussian", "noise_ratio": RATIO}
    if num_classes > 2:
        mechanism["posterior"] = "model"
    defense = NoisyLabelDefense(mechanism=mechanism, insecure_noise_seed=4)
    key = defense.open_noise_key(context, Path("none"))
    ids = [str(number) for number in range(len(labels))]
    built = defense.build(context, Secrets(key, ids=ids, labels=torch.tensor(labels)))
    return torch.as_tensor(built.released_labels(torch.arange(len(labels))).gradient)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_all_noisy_labels_of_a_person_together_meet_the_bound_and_pass_one_for_each_row(
    num_classes: int,
) -> None:
    """The best score of a person whose labels are all 0 or all 1: the sum over its rows.

    The tolerance is three standard errors of the AUC of 4,000 persons with either.
    """
    count, rows = 4000, 4
    labels = np.repeat([1.0, 0.0], count * rows)
    found = {}
    for bounded in (1, rows):
        values = released(labels.tolist(), bounded, num_classes).double().numpy()
        scores = values[:, -1] if num_classes == 2 else values[:, 1] - values[:, 0]
        ones, zeros = scores.reshape(2, count, rows).sum(2)
        found[bounded] = test_noisy_sums.auc_of(ones, zeros)
    assert found[1] == pytest.approx(leak_auc_of_mu(2 / RATIO), abs=0.02)  # .694
    assert found[rows] == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.usefixtures("in_the_clear")
def test_all_bits_for_a_person_meet_its_bound_and_pass_one_for_each_row(num_classes: int) -> None:
    """The tolerance is three standard errors of the AUC of 500 releases of either."""
    bits = np.zeros((6, 7), np.bool_)
    bits[1:4] = True
    found = {}
    for bounded in (1, ROWS):
        scores = []
        for label, keys in ((1, range(500)), (0, range(500, 1000))):
            defense = test_noisy_sums.defense_of(
                [1, *[label] * ROWS, 1, 0], num_classes, rows_of_person=bounded
            )
            own = test_noisy_sums.transferred(defense, bits)
            sums = np.array([test_noisy_sums.noisy(defense, own, key) for key in keys])
            moved = sums[:, :, -1].sum(1) - (sums[:, :, 0].sum(1) if num_classes > 2 else 0)
            scores.append(moved)
        found[bounded] = test_noisy_sums.auc_of(*scores)
    assert found[1] == pytest.approx(leak_auc_of_mu(ROWS / RATIO), abs=0.05)  # .776
    assert found[ROWS] == pytest.approx(0.6, abs=0.055)


# ---- what a run sends, charges, and says ----


def test_a_run_draws_noise_for_the_largest_group_and_charges_the_person(example: Path) -> None:
    parties = persons_run(example)
    sent = released_to(parties)[:, 0].double()
    trainer = parties.session.lifecycle.answering.trainer
    trained = parties.session.lifecycle.answering.rows.splits["train"]
    noise = sent - trainer.labels_of(trained)
    assert stats.kstest(noise / (2 * ROWS**0.5), "norm").pvalue > 0.01
    assert stats.kstest(noise / 2, "norm").pvalue < 0.01
    bounds = parties.session.leak_bounds()
    assert bounds.sum_kl.max == bounds.sum_kl.mean == 0.25


def test_sums_of_a_run_say_the_deviation_for_the_largest_group(example: Path) -> None:
    peer = test_noisy_sums.noting()
    parties = persons_run(example, sums=True)
    run_in_process(parties, peer)
    (deviation,) = np.frombuffer(peer.seen["sums", 0][:8])
    width = len(parties.session.lifecycle.answering.trainer.sums.own)
    assert deviation == pytest.approx(2 * ROWS * width**0.5)
    assert parties.session.leak_bounds().guarantee.max == pytest.approx(leak_auc_of_mu(0.5))


def after(folder: Path, parties: Parties) -> str:
    """Run, keep the accounts, and return the setting for a run that counts them."""
    run_in_process(parties)
    book = parties.session.lifecycle.account_book()
    save_tensors(folder, LEDGER, book.state_dict())
    return f"earlier_ledgers=[{folder}/checkpoint]"


@pytest.mark.parametrize("sums", [False, True])
def test_other_rows_of_the_same_persons_add_up_and_the_same_rows_are_one_release(
    example: Path, tmp_path: Path, sums: bool
) -> None:
    """Also with the same key: noise of other rows is other noise."""
    earlier = after(tmp_path, persons_run(example, sums=sums))
    again = persons_run(example, earlier, sums=sums)
    run_in_process(again)
    assert again.session.leak_bounds().sum_kl.max == (0.5 if sums else 0.25)
    other = tmp_path / "other"
    write_example(other, rows=160)
    name_persons(other / "active.csv", ids="visit--")
    passive = other / "passive.csv"
    passive.write_text(passive.read_text().replace("person-", "visit--"))
    added = persons_run(other, earlier, sums=sums)
    run_in_process(added)
    assert added.session.leak_bounds().sum_kl.max == 0.5
    assert added.session.leak_bounds().guarantee.max == pytest.approx(leak_auc_of_mu(0.5**0.5))


def test_what_was_charged_to_rows_counts_for_their_person_together(
    example: Path, tmp_path: Path
) -> None:
    by_row = build_parties(example, [*NOISY, RELEASE], [*NOISY, SCORE])
    earlier = after(tmp_path, by_row)
    settings = persons_run(example, earlier).active_settings
    # Three rows of one person in training, each at mu = 1/2, are 3/2 together.
    assert "sum_kl 2.25 at most" in plan_of(settings, PartyData.of(settings)).earlier
    run = persons_run(example, earlier)
    run_in_process(run)
    assert run.session.leak_bounds().sum_kl.max == pytest.approx(2.25 + 0.25)


def test_a_run_does_not_go_on_with_other_persons(example: Path, tmp_path: Path) -> None:
    runs = tmp_path / "kept"
    run_in_process(persons_run(example, runs=runs))
    assert persons_run(example, runs=runs).session.reopen()
    table = example / "active.csv"
    head, one, *others = table.read_text().splitlines()
    table.write_text("\n".join([head, f"{one.rpartition(',')[0]},somebody", *others, ""]))
    with pytest.raises(DataError, match="this party's data"):
        persons_run(example, runs=runs).session.reopen()


def test_plan_and_check_say_how_many_rows_a_person_has_and_what_noise_follows(
    example: Path,
) -> None:
    settings = persons_run(example).active_settings
    data = PartyData.of(settings)
    planned = plan_of(settings, data)
    assert planned.bounds_in_short().endswith(": 0.639 for anybody, for each person")
    assert planned.persons in planned.brief
    assert "for each of 51 persons, who have at most 3 training rows each" in planned.persons
    assert "1.73 times as large" in planned.persons
    assert planned.persons.endswith("signal-to-noise ratio of 30 rows, too few for a score.")
    assert planned.persons in [one() for one in _data_and_bounds(settings)]
    settings = persons_run(example, sums=True).active_settings
    assert "noise is 3 times as large" in plan_of(settings, data).persons


def test_the_report_says_that_the_bound_is_for_each_person(example: Path) -> None:
    defense = {"name": "noisy_label", "subject_column": "person"}
    settings = {
        "contract.exchange": "one_shot",
        "contract.release": "noisy_labels",
        "passive.bottom_model": {"kind": "score"},
    }
    (run,) = simulate(example, defense=defense, settings=settings, threads=1)
    assert run.bounds["anybody"] == pytest.approx(leak_auc_of_mu(0.5))
    page = run.report().read_text()
    assert "for anybody, for each person" in page
    assert "for the most exposed person" in page
    assert "The bound is for each person." in run.report().with_name("cover.html").read_text()


# ---- bad input ----


def test_a_row_without_a_person_is_one_and_rows_that_are_never_trained_on_cost_no_noise(
    tmp_path: Path,
) -> None:
    write_example(tmp_path, rows=160)
    path = tmp_path / "active.csv"
    head, *lines = path.read_text().splitlines()
    ends = [",,train"] * 3 + [",ann,test"] * 7 + [",ann,train"] * 2
    whole = [line + end for line, end in zip(lines, ends, strict=False)]
    path.write_text("\n".join([f"{head},person,part", *whole, ""]))
    for split, most in (("", 9), ("contract.split={kind: column, column: part}", 2)):
        both = [*NOISY, *([split] if split else [])]
        settings = build_parties(tmp_path, [*both, GROUPED], [*NOISY, SCORE]).active_settings
        persons = Persons.of(settings, PartyData.of(settings))
        assert persons is not None
        assert (persons.number, persons.most_rows) == (4, most)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("subject_column: nobody", r"defense\.subject_column: .*there is no column 'nobody'"),
        ("subject_column: label", r"defense\.subject_column: names the label column"),
        ("subject_column: own1", r"defense\.subject_column: 'own1' is a feature, too"),
    ],
)
def test_a_column_that_cannot_name_persons_is_named(
    example: Path, setting: str, message: str
) -> None:
    changed = GROUPED.replace("subject_column: person", setting)
    with pytest.raises((DataError, SettingsError), match=message):
        run_in_process(persons_run(example, changed))


def test_cells_that_name_nobody_are_named(tmp_path: Path) -> None:
    table = {"id": ["a", "b"], "x": [1, 2], "person": [7.5, 8.0]}
    parquet.write_table(pa.table(table), tmp_path / "x.parquet")
    source = {"kind": "parquet", "path": "x.parquet"}
    settings = DataSettings.model_validate(
        {"source": source, "id_column": "id", "features": {"numeric": ["x"]}}
    )
    with pytest.raises(DataError, match=r"defense\.subject_column: .*column 'person'.*"):
        read_subjects(settings, tmp_path, "person")


RESPONSE = "{kind: randomized_response, epsilon: 1}"
NOISY_LABEL = f"{{name: noisy_label, mechanism: {RESPONSE}, subject_column: person}}"


@pytest.mark.parametrize("defense", [NOISY_LABEL, f"{{name: gafm, composed_with: {NOISY_LABEL}}}"])
def test_defenses_of_gradients_do_not_bound_persons(example: Path, defense: str) -> None:
    with pytest.raises(SettingsError, match="subject_column"):
        build_parties(example, [f"defense={defense}"])
