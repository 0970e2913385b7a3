"""Projected labels of a later run: rows of earlier runs keep their targets and cost nothing."""

import csv
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from splitveil.active_party.assembly import signals_of
from splitveil.active_party.defenses.dp_bounds import leak_auc_of_mu
from splitveil.active_party.defenses.projected.posterior import Posterior
from splitveil.active_party.ledger.account_book import AccountBook, names_of, open_book
from splitveil.active_party.ledger.stored_labels import TARGETS, ReleasedTargets, read_targets
from splitveil.active_party.results import save_results
from splitveil.active_party.trainer_builder import TrainerBuilder
from splitveil.common.data.ids import numbered_subjects, read_subjects
from splitveil.common.errors import DataError, SettingsError
from splitveil.common.party.party_data import PartyData
from tests.support.projected import DEFENSE, MU, build, projected, trainer_of
from tests.support.runs import CPU, Parties, run_in_process, write_example
from tests.support.tables import swap_labels

FIRST = "defense={name: projected_labels, stages: 2, rank: 8, strength: {mu: 1}}"
LATER = (
    "defense={name: projected_labels, stages: 2, rank: 8, strength: {mu: 1}, "
    "earlier: [first/active/checkpoint]}"
)
LEDGERS = "earlier_ledgers=[first/active/checkpoint]"
NEW_ROWS = 150


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder)
    every = (folder / "active.csv").read_text()
    lines = every.splitlines(keepends=True)
    (folder / "active.csv").write_text("".join(lines[:-NEW_ROWS]))
    first = run(folder, FIRST)
    leave(first, folder / "first")
    (folder / "active.csv").write_text(every)
    return folder


def run(folder: Path, *active: str) -> Parties:
    parties = build(folder, *active)
    run_in_process(parties)
    return parties


def leave(parties: Parties, folder: Path) -> None:
    settings = parties.active_settings
    data = PartyData.load(settings.data, settings.base_dir, settings.contract.split)
    builder = TrainerBuilder(settings, data, CPU)
    (folder / "active").mkdir(parents=True)
    save_results(settings, folder / "active", parties.session, builder)


def training_ids(parties: Parties) -> list[str]:
    rows = parties.session.lifecycle.answering.rows
    return [parties.session.ids[row] for row in rows.file_rows[rows.splits["train"]]]


def test_only_new_rows_are_charged_and_known_rows_keep_their_targets(example: Path) -> None:
    known = read_targets([example / "first" / "active" / "checkpoint"], 2)
    assert known is not None
    later = run(example, LATER, LEDGERS)
    ids = training_ids(later)
    targets = projected(later).released_targets
    assert targets is not None
    training = torch.from_numpy(later.session.lifecycle.answering.rows.splits["train"].copy())
    expected = known.of(ids)
    is_known = ~expected.isnan()
    assert 50 < int(is_known.sum()) < len(ids) - 50
    assert torch.equal(targets[training][is_known], expected[is_known])

    # Known rows have what the first run told of them, mu^2 = 1, and new ones what this run told.
    accounts = later.session.lifecycle.answering.budget.accounts.total
    charged = np.array([accounts.bounds(np.array([at])).sum_kl.max for at in training.tolist()])
    np.testing.assert_allclose(charged, 1.0, rtol=1e-12)
    assert later.active.earlier is not None
    before = later.active.earlier[0]
    assert before == int(is_known.sum())


def test_labels_of_known_rows_are_not_read_again(example: Path) -> None:
    seeded = LATER.replace("stages", "insecure_noise_seed: 3, stages")
    honest = run(example, seeded, LEDGERS)
    known = read_targets([example / "first" / "active" / "checkpoint"], 2)
    assert known is not None
    text = (example / "active.csv").read_text()
    ids, header = training_ids(honest), text.splitlines()[0]
    turned_ids = {name for name, value in zip(ids, known.of(ids), strict=True) if not value.isnan()}
    rows = list(csv.DictReader(text.splitlines()))
    for row in rows:
        if row["id"] in turned_ids:
            row["label"] = str(1 - int(row["label"]))
    (example / "active.csv").write_text(
        "\n".join([header, *(",".join(row.values()) for row in rows)]) + "\n"
    )
    try:
        turned = run(example, seeded, LEDGERS)
    finally:
        (example / "active.csv").write_text(text)
    for name, value in honest.weights().items():
        assert torch.equal(value, turned.weights()[name]), name


@pytest.mark.parametrize(
    "taken",
    [
        ["defense.earlier=[first/active/checkpoint]", LEDGERS],
        [LEDGERS],
        ["initial_weights=first/active/checkpoint"],
    ],
)
def test_what_a_known_seed_has_released_is_taken_over_by_rehearsals_alone(
    tmp_path: Path, taken: list[str]
) -> None:
    """The seed gives the noise, and the sums less the noise are the labels' own."""
    write_example(tmp_path)
    leave(run(tmp_path, DEFENSE), tmp_path / "first")
    build(tmp_path, DEFENSE, *taken)
    with pytest.raises(SettingsError, match="knows the insecure_noise_seed of that run") as caught:
        build(tmp_path, FIRST, *taken)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    shutil.rmtree(tmp_path / "first")
    leave(run(tmp_path, FIRST), tmp_path / "first")
    build(tmp_path, FIRST, *taken)


def test_a_run_without_new_rows_tells_nothing(example: Path) -> None:
    leave(run(example, LATER, LEDGERS), example / "second")
    second = [setting.replace("first/", "second/") for setting in (LATER, LEDGERS)]
    again = run(example, *second)
    assert again.active.earlier is not None
    assert again.session.leak_bounds() == again.active.earlier[1]
    assert trainer_of(again).pending_release(0) is None


def test_a_run_on_the_same_rows_makes_its_own_targets_from_the_same_sums(tmp_path: Path) -> None:
    write_example(tmp_path)
    first = run(tmp_path, FIRST)
    leave(first, tmp_path / "first")
    other_model = "model_seed=9"
    again = run(tmp_path, LATER, LEDGERS, other_model)
    assert again.session.leak_bounds() == first.session.leak_bounds()
    training = torch.from_numpy(again.session.lifecycle.answering.rows.splits["train"].copy())
    one, other = projected(first).released_targets, projected(again).released_targets
    assert one is not None
    assert other is not None
    assert not torch.equal(one[training], other[training])
    posterior, prior = Posterior(), torch.full((len(training),), 0.3)
    posterior.load_state_dict(projected(again).releases)
    expected = Posterior()
    expected.load_state_dict(projected(first).releases, len(training))
    assert torch.equal(posterior.targets(prior), expected.targets(prior))

    # No label is read: with all of them turned, the run is the same.
    swap_labels(tmp_path / "active.csv")
    weights = run(tmp_path, LATER, LEDGERS, other_model).weights()
    assert all(torch.equal(weights[name], one) for name, one in again.weights().items())


def test_releases_are_for_just_their_rows_in_any_order(tmp_path: Path) -> None:
    steps = torch.arange(6, dtype=torch.int16).reshape(3, 2)
    parts = {"gram": torch.zeros(2, 2), "sums.0": torch.zeros(2), "numbers.0": torch.ones(2)}
    names, state = names_of(["a", "b", "c"]), {"steps.0": steps, **parts}
    right = ReleasedTargets(names, torch.zeros(3), releases=state)
    save_file(dict(right.state_dict()), tmp_path / TARGETS)
    known = read_targets([tmp_path], 2)
    assert known is not None
    assert torch.equal(known.releases_of(["c", "a", "b"])["steps.0"], steps[[2, 0, 1]])
    assert known.releases_of(["a", "b"]) == known.releases_of(["a", "b", "d"]) == {}
    (tmp_path / "other").mkdir()
    of_z = ReleasedTargets(names_of(["z"]), torch.zeros(1))
    save_file(dict(of_z.state_dict()), tmp_path / "other" / TARGETS)
    both = read_targets([tmp_path / "other", tmp_path], 2)
    assert both is not None
    assert torch.equal(both.releases_of(["c", "a", "b"])["steps.0"], steps[[2, 0, 1]])
    assert both.releases_of(["a", "b", "z"]) == {}
    wrong = ReleasedTargets(names, torch.zeros(3), releases=state | {"steps.0": steps[:2]})
    save_file(dict(wrong.state_dict()), tmp_path / TARGETS)
    with pytest.raises(SettingsError, match="expected a design of 3 rows, got 2"):
        read_targets([tmp_path], 2)


@pytest.mark.parametrize(
    ("folder", "message"), [("nowhere", f"there is no {TARGETS}"), ("damaged", "cannot be read")]
)
def test_a_folder_without_whole_targets_is_refused(
    example: Path, folder: str, message: str
) -> None:
    (example / "damaged").mkdir(exist_ok=True)
    (example / "damaged" / TARGETS).write_bytes(b"no tensors")
    with pytest.raises(SettingsError, match=message):
        build(example, LATER.replace("first/active/checkpoint", folder), LEDGERS)


def test_targets_of_other_classes_are_refused(example: Path) -> None:
    with pytest.raises(SettingsError, match="does not hold targets of 3 classes"):
        read_targets([example / "first" / "active" / "checkpoint"], 3)


def test_rows_of_one_person_share_one_bound(tmp_path: Path) -> None:
    """Without subjects, the rows of one person together weigh more than the bound of one row."""
    write_example(tmp_path)
    add_subjects(tmp_path, rows_per_person=5)
    alone = "defense={name: projected_labels, stages: 1, rank: 8, insecure_noise_seed: 1}"
    shared = alone.replace("stages", "subject_column: person, stages")
    largest = {}
    for name, setting in (("alone", alone), ("shared", shared)):
        parties = run(tmp_path, setting)
        state = projected(parties).state_dict()
        unit = float(state["posterior.numbers.0"][0])
        weights = state["posterior.steps.0"].double() * unit
        norms = torch.linalg.vector_norm(weights, dim=1)
        numbers = subjects_of(parties, tmp_path)
        sums = torch.zeros(int(numbers.max()) + 1, dtype=torch.float64)
        largest[name] = float(sums.index_add_(0, numbers, norms).max())
    assert largest["alone"] > 1.5
    # The bound of |sum of changes| is at most 1; the norms of a person's rows may add up to
    # sqrt(rows) times that, where the rows are orthogonal.
    assert largest["shared"] <= 5**0.5


def add_subjects(folder: Path, rows_per_person: int) -> None:
    lines = (folder / "active.csv").read_text().splitlines()
    with_person = [lines[0] + ",person"]
    with_person += [f"{line},p{row // rows_per_person}" for row, line in enumerate(lines[1:])]
    (folder / "active.csv").write_text("\n".join(with_person) + "\n")


def subjects_of(parties: Parties, folder: Path) -> torch.Tensor:
    subjects = numbered_subjects(read_subjects(parties.active_settings.data, folder, "person"))
    rows = parties.session.lifecycle.answering.rows
    return torch.from_numpy(subjects[rows.file_rows[rows.splits["train"]]])


def test_a_person_with_a_new_row_in_each_of_four_runs_has_one_account_over_all_of_them(
    tmp_path: Path,
) -> None:
    """The exact likelihood ratio of a person's label reaches what the last ledger says.

    By rows each of them was charged once, at .600.
    """
    write_example(tmp_path)
    table = tmp_path / "active.csv"
    header, *lines = table.read_text().splitlines()
    trained = training_ids(run(tmp_path, FIRST))[:120]
    place = {name: divmod(at, 4) for at, name in enumerate(trained)}  # person, and run from 0
    mu_squared, accounts, earlier = torch.zeros(30, dtype=torch.float64), [], ""
    for number in range(4):
        with_person = [(line, place.get(line.partition(",")[0])) for line in lines]
        kept = [(line, at) for line, at in with_person if at is None or at[1] <= number]
        rows = [f"{line},{'' if at is None else f'p{at[0]}'}" for line, at in kept]
        table.write_text("\n".join([f"{header},person", *rows]) + "\n")
        setting = f"stages: 2, rank: 8, insecure_noise_seed: {number}, subject_column: person"
        after = [f"earlier_ledgers=[{earlier}]"] if earlier else []
        known = f", earlier: [{earlier}]" if earlier else ""
        parties = run(tmp_path, f"defense={{name: projected_labels, {setting}{known}}}", *after)
        accounts.append(parties.session.leak_bounds().guarantee.max)
        leave(parties, tmp_path / f"run{number}")
        earlier = f"run{number}/active/checkpoint"

        state, ids = projected(parties).state_dict(), training_ids(parties)
        new = [ids.index(name) for name in trained[number::4]]
        for stage in range(2):
            unit = float(state[f"posterior.numbers.{stage}"][0])
            weights = state[f"posterior.steps.{stage}"][new].double() * unit
            mu_squared += (weights.norm(dim=1) / projected(parties).sigma_of(stage)).square()
    expected = [leak_auc_of_mu(MU * math.sqrt(number)) for number in (1, 2, 3, 4)]
    assert accounts == pytest.approx(expected, abs=1e-4)
    found = leak_auc_of_mu(float(mu_squared.max().sqrt()))
    # Weights are rounded towards 0, in steps of at most 2^-14: measured, that takes 1.0e-5 away.
    assert found == pytest.approx(accounts[-1], abs=2e-5)
    assert found > accounts[0] + 0.05

    # Without the column, the rows have what was charged to their persons.
    seeded = "stages: 2, rank: 8, insecure_noise_seed: 4"
    alone = f"defense={{name: projected_labels, {seeded}, earlier: [{earlier}]}}"
    later = run(tmp_path, alone, f"earlier_ledgers=[{earlier}]")
    assert later.session.leak_bounds().guarantee.max == accounts[-1]


def test_a_row_without_a_person_has_one_of_its_own(tmp_path: Path) -> None:
    write_example(tmp_path)
    text = (tmp_path / "active.csv").read_text().splitlines()
    lines = [text[0] + ",person", text[1] + ",a", text[2] + ",", text[3] + ",a", text[4] + ","]
    (tmp_path / "active.csv").write_text("\n".join(lines) + "\n")
    settings = build(tmp_path, "data.features.numeric=own1").active_settings
    subjects = read_subjects(settings.data, tmp_path, "person")
    first, second, third, fourth = numbered_subjects(subjects).tolist()
    assert first == third
    assert len({first, second, fourth}) == 3


def test_a_wrong_column_of_persons_is_refused_before_the_run(tmp_path: Path) -> None:
    write_example(tmp_path)
    missing = "defense={name: projected_labels, subject_column: nobody}"
    with pytest.raises(DataError, match="nobody"):
        build(tmp_path, missing)
    feature = "defense={name: projected_labels, subject_column: own1}"
    with pytest.raises(SettingsError, match="'own1' is a feature, too"):
        build(tmp_path, feature)


def test_targets_count_by_what_a_ledger_holds_and_not_by_where_their_folder_lies(
    tmp_path: Path,
) -> None:
    """A folder under ``runs_dir`` that no search finds, and a ledger that has other charges."""
    write_example(tmp_path)
    weaker = FIRST.replace("mu: 1", "mu: 0.5")
    for name, defense in (("runs/archive/first", FIRST), ("other", weaker)):
        leave(run(tmp_path, defense), tmp_path / name)
    deeper, other = (f"{tmp_path}/{at}/active/checkpoint" for at in ("runs/archive/first", "other"))
    later = LATER.replace("first/active/checkpoint", deeper)
    uncounted = r"defense\.earlier: .*archive/first/.* needs earlier_ledgers"
    for ledgers in ("null", "[]", f"[{other}]"):
        with pytest.raises(SettingsError, match=uncounted):
            build(tmp_path, later, f"earlier_ledgers={ledgers}")
    # The trial's own folder counts like the run from which it has its targets, and adds nothing.
    trial = run(tmp_path, later, f"earlier_ledgers=[{deeper}]")
    leave(trial, tmp_path / "trial")
    books = [open_book(folder) for folder in (Path(deeper), tmp_path / "trial/active/checkpoint")]
    assert AccountBook.together(books, books[0].id_rules).most() == books[0].most() > 0
    build(tmp_path, later, f"earlier_ledgers=[{tmp_path}/trial/active/checkpoint]")
    again = LATER.replace("first", f"{tmp_path}/trial")
    build(tmp_path, again, f"earlier_ledgers=[{deeper}]")
    with pytest.raises(SettingsError, match=r"trial/.* needs earlier_ledgers"):
        build(tmp_path, again, f"earlier_ledgers=[{other}]")


def test_released_weights_count_by_what_a_ledger_holds(tmp_path: Path) -> None:
    write_example(tmp_path)
    leave(run(tmp_path, FIRST), tmp_path / "runs/archive/first")
    checkpoint = tmp_path / "runs/archive/first/active/checkpoint"
    settings = build(tmp_path, FIRST, f"initial_weights={checkpoint}").active_settings
    (signal,) = signals_of(settings, AccountBook.empty())
    assert "is not counted: name that run in earlier_ledgers" in signal.why
    assert signals_of(settings, open_book(checkpoint)) == ()
