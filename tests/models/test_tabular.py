"""Whole runs of tabular models: they resume bit for bit, and no column leads to NaN."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.model_files import save_model
from tests.support.runs import build_parties, run_in_process, write_example, write_table

MODEL = "{kind: tabular, hidden: [8], embedding_dim: 3}"
STEPS = "optimizer={kind: adamw, learning_rate: 0.01, weight_decay: 0.01, clip_norm: 0.5}"
TOP, BOTTOM = f"top_model={MODEL}", f"bottom_model={MODEL}"
BY_COLUMN = "contract.split={kind: column, column: fold}"


ROWS = 200
FOLDS = [("train", "train", "train", "validation", "test")[row % 5] for row in range(ROWS)]
IS_NEW = [fold != "train" for fold in FOLDS]
EMPTY = "data.features={numeric: 'x*', missing_numeric: mean, missing_indicator: true}"
NO_INFINITY = EMPTY.replace("true}", "true, missing_texts: ['', inf, -inf]}")
WORDS = "data.features={numeric: 'x*', categorical: [word]}"
LOG = "data.features={numeric: 'x*', signed_log1p: true}"
UNSCALED = "data.features={numeric: 'x*', numeric_scaling: none}"


COLUMNS: dict[str, tuple[dict[str, Sequence[object]], str, str | None]] = {
    "one value": ({"x": [5] * ROWS}, "", None),
    "two values": ({"x": [row % 2 for row in range(ROWS)]}, "", None),
    "more bins than values": ({"x": [row % 3 - 1e30 for row in range(ROWS)]}, "", None),
    "extreme in new rows": (
        {"x": [3e38 if new else row for row, new in enumerate(IS_NEW)]},
        UNSCALED,
        None,
    ),
    "constant in training rows only": ({"x": [-3e38 if new else 0 for new in IS_NEW]}, "", None),
    "constant in training rows only, of counts": (
        {"x": [-3e38 if new else 0 for new in IS_NEW]},
        LOG,
        None,
    ),
    "the smallest numbers": ({"x": [row % 2 * 5e-324 for row in range(ROWS)]}, UNSCALED, None),
    "numbers too small to square": ({"x": [row * 1e-42 for row in range(ROWS)]}, "", None),
    "gaps": ({"x": ["" if row % 3 else row for row in range(ROWS)]}, EMPTY, None),
    "nothing but gaps in training rows": (
        {"x": [row if new else "" for row, new in enumerate(IS_NEW)]},
        EMPTY,
        None,
    ),
    "gaps without a rule for them": (
        {"x": ["" if row % 3 else row for row in range(ROWS)]},
        "",
        "missing",
    ),
    "infinite numbers as gaps": (
        {"x": ["inf" if row % 3 else row for row in range(ROWS)]},
        NO_INFINITY,
        None,
    ),
    "infinite numbers": ({"x": ["inf" if row % 3 else row for row in range(ROWS)]}, "", "infinite"),
    "2,000 columns": (
        {f"x{j}": [row * j % 7 for row in range(ROWS)] for j in range(2_000)},
        "",
        None,
    ),
    "a category never seen": (
        {
            "x": range(ROWS),
            "word": ["new" if new else f"w{row % 3}" for row, new in enumerate(IS_NEW)],
        },
        WORDS,
        None,
    ),
}


@pytest.mark.parametrize(("columns", "features", "refusal"), COLUMNS.values(), ids=COLUMNS)
def test_a_column_is_trained_on_or_refused_in_one_sentence(
    tmp_path: Path, columns: dict[str, Sequence[object]], features: str, refusal: str | None
) -> None:
    ids, labels = [f"person-{row:05d}" for row in range(ROWS)], [row % 2 for row in range(ROWS)]
    write_example(tmp_path)
    own = columns.get("x", range(ROWS))
    write_table(tmp_path / "active.csv", "id,fold,label,x", range(ROWS), ids, FOLDS, labels, own)
    head = ",".join(["id", "fold", *columns])
    write_table(tmp_path / "passive.csv", head, range(ROWS), ids, FOLDS, *columns.values())
    shared = [STEPS, BY_COLUMN]
    both = [features or "data.features={numeric: 'x*'}"] if "word" not in columns else []

    def run() -> None:
        active = [*shared, TOP, *(both or ["data.features={numeric: 'x*'}"])]
        parties = build_parties(tmp_path, active, [*shared, BOTTOM, *(both or [features])])
        run_in_process(parties)
        assert all(bool(weight.isfinite().all()) for weight in parties.weights().values())
        for evaluation in parties.active.evaluations:
            assert math.isfinite(
                evaluation.figures.form()["loss"]
            )  # a row with NaN would make it NaN

    if refusal is None:
        run()
    else:
        with pytest.raises(SplitveilError, match=refusal) as caught:
            run()
        assert "\n" not in str(caught.value)


def test_a_single_training_row_is_enough(tmp_path: Path) -> None:
    write_example(tmp_path)
    for name in ("active", "passive"):
        columns = "abc", ("train", "validation", "test"), (0, 1, 0), (0.5, 1e38, 0.5)
        write_table(tmp_path / f"{name}.csv", "id,fold,label,x1", range(3), *columns)
    shared = [BY_COLUMN, "contract.alignment={min_aligned: 1}", "data.features={numeric: x1}"]
    parties = build_parties(tmp_path, [*shared, TOP], [*shared, BOTTOM, "adversary=null"])
    run_in_process(parties)
    assert all(bool(weight.isfinite().all()) for weight in parties.weights().values())
    assert [
        math.isfinite(found.figures.form()["loss"]) for found in parties.active.evaluations
    ] == [True] * 4


def test_a_model_without_bins_is_not_continued_as_one_with_bins(tmp_path: Path) -> None:
    write_example(tmp_path)
    first = build_parties(tmp_path)
    run_in_process(first)
    trainer = first.run.trainer
    assert trainer is not None
    encoder = PartyData.of(first.passive_settings).fit(np.arange(300))
    (tmp_path / "first").mkdir()
    save_model(tmp_path / "first", trainer.model, encoder)
    later = build_parties(tmp_path, [], [BOTTOM, "initial_weights=first/checkpoint"])
    with pytest.raises(SettingsError, match="without bins"):
        run_in_process(later)
