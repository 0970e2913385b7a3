"""``splitveil init`` for a label that is a number: its bounds, and settings that train."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.settings import LabelRange
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.deploy.init.choices import Wishes
from splitveil.deploy.init.initialise import Written, initialise
from splitveil.deploy.init.labels import Within
from splitveil.deploy.init.proposal import Terms
from tests.init.test_init import command, write
from tests.support import simulation

ROWS = 500


def houses(
    folder: Path, scale: float = 1.0, shift: float = 0.0, **others: Sequence[object]
) -> Path:
    """Write a label owner's table, and a feature owner's, on whose columns the price depends."""
    made = np.random.default_rng(5)
    rooms, age = made.integers(1, 8, ROWS), made.random(ROWS) * 90
    price = (700 + 320 * rooms - 4.5 * age + 60 * made.standard_normal(ROWS)) * scale + shift
    ids = [f"h{number:04d}" for number in made.permutation(ROWS)]
    write(folder / "houses.csv", {"id": ids, "age": [f"{one:.1f}" for one in age]})
    columns: dict[str, Sequence[object]] = {
        "id": ids,
        "price": [repr(float(one)) for one in price],
        "rooms": rooms.tolist(),
        "garden": ["yn"[number % 2] for number in range(ROWS)],
    }
    return write(folder / "prices.csv", columns | others)


def active(folder: Path, path: Path, **wishes: object) -> Written:
    chosen = Wishes(label_column="price")._replace(**wishes)  # type: ignore[arg-type]
    return initialise(path, chosen, Terms("active", folder), force=True)


def bounds(written: Written) -> Within:
    label = written.proposal.choices.label
    assert label is not None
    assert label.within is not None
    return label.within


def test_what_is_written_for_numbers_trains_as_it_is(tmp_path: Path) -> None:
    active(tmp_path, houses(tmp_path))
    initialise(tmp_path / "houses.csv", Wishes(), Terms("passive", tmp_path))
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml")
    assert settings.data.label_range == LabelRange(low=0, high=5000, outside="clipped")
    run = simulation.build(simulation.read_settings(tmp_path, ["refit.epochs=2"]))
    run.meet()
    run.fit_top()
    found = run.active.seen.evaluations[-1].figures
    assert found.rmse is not None
    assert found.rmse > 0


def test_the_file_says_why_the_bounds_have_to_be_chosen(tmp_path: Path) -> None:
    path = houses(tmp_path, target=[number / 7 for number in range(ROWS)])
    by_name = active(tmp_path, path, label_column=None).proposal.choices.label
    assert by_name is not None
    assert by_name.column == "target"
    active(tmp_path, path)
    written = (tmp_path / "active.yaml").read_text()
    assert "CHOOSE THESE BOUNDS YOURSELF" in written
    assert "label_range" not in (tmp_path / "contract.yaml").read_text()
    active(tmp_path, path, label_range=(0.0, 4500.0))
    chosen = (tmp_path / "active.yaml").read_text()
    assert "CHOOSE" not in chosen
    in_file = {"low": 0.0, "high": 4500.0, "outside": "refused"}
    assert yaml.safe_load(chosen)["data"]["label_range"] == in_file


@pytest.mark.parametrize(
    ("scale", "shift", "low", "high"),
    [
        (1.0, 0.0, 0, 5_000),
        (1e-9, 0.0, 0, 5e-6),
        (1e12, 0.0, 0, 5e15),
        (-1.0, 0.0, -5_000, 0),
        (1.0, -2_000.0, -2_000, 2_000),
    ],
)
def test_no_more_than_the_order_of_the_largest_label_is_proposed(
    tmp_path: Path, scale: float, shift: float, low: float, high: float
) -> None:
    found = bounds(active(tmp_path, houses(tmp_path, scale, shift)))
    assert (found.low, found.high) == (low, high)
    assert found.holds_all
    settings = load_party_settings(ActiveSettings, tmp_path / "active.yaml")
    assert settings.data.label_range == LabelRange(low=low, high=high, outside="clipped")


def test_few_numbers_are_classes_unless_bounds_are_given(tmp_path: Path) -> None:
    path = houses(tmp_path, stars=[number % 5 for number in range(ROWS)])
    as_classes = active(tmp_path, path, label_column="stars").proposal.choices.label
    assert as_classes is not None
    assert (as_classes.within, as_classes.classes) == (None, 5)
    as_number = active(tmp_path, path, label_column="stars", label_range=(0.0, 4.0))
    assert bounds(as_number).outside == "refused"
    clipped = bounds(active(tmp_path, path, label_column="stars", label_range=(0.0, 3.0)))
    assert (clipped.outside, clipped.holds_all) == ("clipped", False)
    with pytest.raises(SettingsError, match="expected a number in every row of column 'garden'"):
        active(tmp_path, path, label_column="garden", label_range=(0.0, 4.0))
    path = houses(tmp_path, cost=["" if one % 9 == 0 else one / 7 for one in range(ROWS)])
    with pytest.raises(SettingsError, match="in every row, or a number"):
        active(tmp_path, path, label_column="cost")


def test_columns_that_follow_the_number_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = houses(tmp_path).read_text().splitlines()[1:]
    in_euros = [f"{float(line.split(',')[1]) * 1.08:.3f}" for line in lines]
    path = houses(tmp_path, in_euros=in_euros)
    of_label = ("--label-column", "price", "--label-range", 0, 9000)
    assert command("active", path, "--folder", tmp_path, *of_label, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert "gives the label away" in document["left_out"]["in_euros"]
    assert "rooms" not in document["left_out"]
    assert document["label_range"] == [0, 9000]
    assert document["num_classes"] is document["rarest_share"] is None


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        ("active", ["--label-range", 5, 5], "the lower one first"),
        ("active", ["--label-range", "nan", 5], "the lower one first"),
        ("active", ["--label-range", 0, 5, "--positive-label", "a"], "have no --positive-label"),
        ("passive", ["--label-range", 0, 5], "only the active party has labels"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    role: str,
    options: list[object],
    message: str,
) -> None:
    assert command(role, houses(tmp_path), "--folder", tmp_path, *options) == 2
    assert message in capsys.readouterr().err
