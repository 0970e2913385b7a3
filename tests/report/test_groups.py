"""Predictions by group of the label owner's rows: the figures, and their way to the page."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import roc_auc_score

from splitveil import Run, simulate
from splitveil.active_party.report import write_report
from splitveil.active_party.training.evaluation import HeldOutPredictions, measure_groups
from splitveil.common.data.columns import CategoricalColumn
from splitveil.common.errors import DataError
from splitveil.common.privacy.figures import GroupFigures
from splitveil.common.record.run_record import find_summary
from tests.report.test_report import page_of, words_of, write_run
from tests.support.records import known

ROWS = 2000
OTHER = "other: of fewer than 50 rows, or beyond 50 groups"


def group_codes(rng: np.random.Generator) -> np.ndarray:
    """Return code 0 for most rows, 1 for a third, 2 for a few, and -1 for no entry."""
    return rng.choice([0, 1, 2, -1], ROWS, p=[0.5, 0.35, 0.01, 0.14]).astype(np.int32)


def figures_of(groups: CategoricalColumn, test: HeldOutPredictions) -> dict[str, GroupFigures]:
    return {one.group: one for one in known(measure_groups(groups, np.arange(ROWS), test))}


def test_each_group_has_the_figures_of_its_own_rows() -> None:
    """Labels of one group are random: its AUC is near 1/2, the other's is high, and not swapped."""
    rng = np.random.default_rng(1)
    scores, codes = rng.normal(size=ROWS).astype(np.float32), group_codes(rng)
    labels = (scores + rng.normal(0, 0.5, ROWS) > 0.5).astype(np.float32)
    south = codes == 1
    labels[south] = rng.random(south.sum()) < 0.2
    groups = CategoricalColumn(codes, pa.array(["north", "south", "far"]))
    test = HeldOutPredictions(torch.from_numpy(scores), torch.from_numpy(labels))
    found = figures_of(groups, test)
    *names, other = found
    assert names == ["all rows", "north", "south", "no entry"]
    assert sum(one.rows or 0 for one in found.values()) == 2 * ROWS
    assert found[other] == GroupFigures(other, (codes == 2).sum())  # too few for any figure
    assert other == OTHER
    for name, rows in (("north", codes == 0), ("south", south), ("no entry", codes == -1)):
        one, auc = found[name], known(found[name].auc)
        assert auc.value == pytest.approx(roc_auc_score(labels[rows], scores[rows]))
        assert auc.low < auc.value < auc.high
        assert known(one.actual).value == pytest.approx(labels[rows].mean())
        assert one.predicted == pytest.approx((1 / (1 + np.exp(-scores[rows]))).mean(), abs=1e-6)
        highest = np.argsort(-scores)[: int(labels.sum())]  # of all rows: one threshold for all
        share = np.isin(np.flatnonzero(rows), highest).mean()
        assert known(one.selected).value == pytest.approx(share)
    random, learned = known(found["south"].auc), known(found["north"].auc)
    assert random.low < 0.5 < random.high < 0.65
    assert learned.low > 0.9


def test_an_interval_of_a_share_is_wilson_s_and_small_classes_have_no_auc() -> None:
    labels = np.zeros(ROWS, np.float32)
    labels[:9] = 1
    groups = CategoricalColumn(np.zeros(ROWS, np.int32), pa.array(["north"]))
    scores = torch.arange(ROWS, dtype=torch.float32)
    one = figures_of(groups, HeldOutPredictions(scores, torch.from_numpy(labels)))["north"]
    assert one.auc is None
    actual = known(one.actual)
    # (9 + z^2 / 2 -+ z sqrt(9 1991 / 2000 + z^2 / 4)) / (2000 + z^2) with z = 1.96
    assert (actual.low, actual.high) == pytest.approx((0.00237, 0.00853), abs=1e-5)


def test_the_largest_groups_have_figures_and_the_rest_is_one() -> None:
    codes = np.repeat(np.arange(60, dtype=np.int32), 50)
    codes[:10] = 59  # the last group has 60 rows, the first has 40
    groups = CategoricalColumn(codes, pa.array([f"region {number}" for number in range(60)]))
    test = HeldOutPredictions(torch.arange(3000.0), torch.arange(3000.0) % 2)
    first, *own, other = known(measure_groups(groups, np.arange(3000), test))
    assert (first.group, first.rows) == ("all rows", 3000)
    assert [one.group for one in own] == [f"region {k}" for k in (59, *range(1, 50))]
    assert (other.group, other.rows) == (OTHER, 40 + 9 * 50)


ONE_SHOT = {"contract.exchange": "one_shot", "passive.bottom_model": {"kind": "pca"}}
ASKED = {"active.report.group_column": "region"}
GRADIENTS = {"contract.epochs": 2, **ASKED}
TRAINED = {**GRADIENTS, "active.inference.model": "trained"}


def table_of(run: Run) -> dict[str, GroupFigures] | None:
    groups = known(find_summary(run.path / "active")).of_active.model.groups
    return None if groups is None else {one.group: one for one in groups}


@pytest.mark.parametrize("exchange", [ONE_SHOT, GRADIENTS, TRAINED])
def test_a_run_or_a_later_refit_measures_the_model_that_predicts(
    exchange: dict[str, object], tmp_path: Path
) -> None:
    """Rows without a label are left out; they come first, and would shift all groups by 50 rows."""
    rng = np.random.default_rng(2)
    codes, columns = group_codes(rng), rng.normal(size=(ROWS, 3))
    labels = (columns[:, 0] + columns[:, 1] > 0).astype(int)
    labels[codes == 1] = rng.integers(0, 2, (codes == 1).sum())
    regions = np.array(["north", "south", "far", None])[codes]
    own = {
        "id": [*range(ROWS, ROWS + 50), *range(ROWS)],
        "y": [None] * 50 + labels.tolist(),
        "region": ["north"] * 50 + regions.tolist(),
        "age": np.append(np.zeros(50), columns[:, 2]),
    }
    settings = {
        "contract.split": {"kind": "hash", "train": 0.5, "test": 0.5},
        "contract.batch_size": 100,
        "active.optimizer.learning_rate": 0.02,
        "active.refit.epochs": 5,
        "active.data.unlabelled_rows": "leave_out",
        "active.data.features": {"numeric": ["age"]},  # the groups are none
    }
    (run,) = simulate(
        active=own,
        passive={"id": range(ROWS), "a": columns[:, 0], "b": columns[:, 1]},
        label="y",
        key="id",
        settings=settings | exchange,
        attacks=[],
        runs=tmp_path,
        threads=1,
    )
    if exchange is ONE_SHOT:
        assert table_of(run) is None
        run.refit({"report.group_column": "region"})
    found = known(table_of(run))
    everyone, north, south = (known(found[name].auc) for name in ("all rows", "north", "south"))
    assert south.value < 0.62
    assert north.value > 0.9
    if exchange is TRAINED:
        assert run.summary["test_auc_refit"] != pytest.approx(run.test_auc)
        assert everyone.value == pytest.approx(run.test_auc)
        run.refit({"refit.epochs": 1})
        assert table_of(run) == found
    else:
        assert everyone.value == pytest.approx(run.summary.get("test_auc_refit", run.test_auc))
    if exchange is GRADIENTS:
        page = words_of(write_report(run.path).read_text(encoding="utf-8"))
        assert "Predictions by region" in page
        assert f"{south.value:.3f} ({south.low:.3f} to {south.high:.3f})" in page


def test_a_column_that_is_not_there_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    own = {"id": range(20), "y": [0, 1] * 10, "region": ["north"] * 20}
    theirs = {"id": range(20), "a": np.arange(20.0)}
    with pytest.raises(DataError, match=r"report.group_column: .*active.* no column 'regoin'"):
        simulate(
            active=own,
            passive=theirs,
            label="y",
            key="id",
            settings={"active.report.group_column": "regoin"},
            runs=tmp_path,
        )


def test_the_page_says_why_a_run_has_no_table(tmp_path: Path) -> None:
    asked: dict[str, object] = {"report": {"group_column": "region"}}
    assert "splitveil refit measures" in words_of(
        page_of(write_run(tmp_path / "a", settings=asked))
    )
    asked |= {"data": {"classes": ["a", "b", "c"]}}
    assert "needs labels of two classes" in words_of(
        page_of(write_run(tmp_path / "b", settings=asked))
    )
    assert "Predictions by" not in words_of(page_of(write_run(tmp_path / "c")))
