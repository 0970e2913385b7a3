"""Predictions of many ids in parts: what is kept, what is done again, and what is refused."""

import itertools
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import parquet

from splitveil.active_party.predict import batch
from splitveil.active_party.predict.batch import (
    BatchPrediction,
    Parts,
    PredictionPlan,
    check_lengths,
)
from splitveil.active_party.predict.predictor import Predictor
from splitveil.common.errors import DataError, PeerUnreachable, SettingsError, StorageError
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.record.table_output import check_output
from splitveil.common.wire import connection
from splitveil.passive_party.predict.service import InferenceService
from tests.support.inference import Trained, predicting

IMPATIENT = ReconnectSettings(max_s=0.3)
REQUEST = 20
PART = 100


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "PART_ROWS", PART)
    monkeypatch.setattr(connection, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(Predictor, "max_ids", property(lambda _: REQUEST))


IDS = [f"row-{number:04d}" for number in range(480)] + ["nobody"] * 5


def opened(output: Path, *, model: str = "one", ids: Sequence[str] = IDS) -> Parts:
    return Parts(output, PredictionPlan(model, ""), ids)


def predict(
    predictor: Predictor,
    output: Path,
    reconnect: ReconnectSettings = IMPATIENT,
    ids: Sequence[str] = IDS,
    most_parts: int | None = None,
) -> list[int]:
    """Predict some ids, perhaps the first parts alone, and return the reported progress."""
    parts, contract = opened(output, ids=ids), predictor.clients[0].connection.contract
    del parts.missing[len(parts.missing) if most_parts is None else most_parts :]
    reported: list[int] = []
    BatchPrediction(predictor, contract, reconnect, Interruption()).run(parts, reported.append)
    return reported


def column(path: Path) -> NDArray[Any]:
    return np.asarray(parquet.read_table(path).column("probability").to_numpy())


@pytest.fixture(scope="module")
def undisturbed(small: Trained, tmp_path_factory: pytest.TempPathFactory) -> NDArray[Any]:
    output = tmp_path_factory.mktemp("undisturbed") / "all.parquet"
    with predicting(small) as predictor:
        predict(predictor, output)
    found = column(output)
    assert np.isnan(found).sum() == 5
    return found


def failing_after(requests: int, monkeypatch: pytest.MonkeyPatch, *, times: int = 10**6) -> None:
    """Let the passive party lose its connections after a number of requests, a number of times."""
    reply: Callable[..., Any] = InferenceService._reply
    seen = itertools.count(1)

    def failing(self: InferenceService, request: Any, context: Any) -> Any:
        if requests < next(seen) <= requests + times:
            context.cancel()
            return None
        return reply(self, request, context)

    monkeypatch.setattr(InferenceService, "_reply", failing)


def test_a_lost_connection_is_opened_again_and_changes_no_bit(
    small: Trained, undisturbed: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_after(7, monkeypatch, times=3)
    output = tmp_path / "all.parquet"
    with predicting(small) as predictor:
        reported = predict(predictor, output, reconnect=ReconnectSettings())
    np.testing.assert_array_equal(column(output), undisturbed)
    assert sum(reported) == len(IDS)


def test_a_prediction_that_broke_off_goes_on_with_its_finished_parts(
    small: Trained, undisturbed: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "all.parquet"
    with monkeypatch.context() as patch:
        failing_after(2 * PART // REQUEST + 3, patch)
        with predicting(small) as predictor, pytest.raises(PeerUnreachable, match="max_s"):
            predict(predictor, output)
    kept = sorted(path.name for path in (tmp_path / "all.parquet.parts").iterdir())
    assert kept == ["00000000.splitveil-part", "00000001.splitveil-part"]
    assert not output.exists()
    with predicting(small) as predictor:
        reported = predict(predictor, output)
    assert reported[0] == 2 * PART
    np.testing.assert_array_equal(column(output), undisturbed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet"]
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


def write_two_parts(output: Path, **of_parts: Any) -> list[Path]:
    parts = opened(output, **of_parts)
    for part in parts.missing[:2]:
        parts.write(part, np.zeros(PART, np.float32), np.ones(PART, np.bool_))
    return sorted(parts.folder.iterdir())


def flipped(place: float) -> Callable[[Path, Path], None]:
    def damage(path: Path, _: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(place * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return damage


def as_parquet(path: Path, _: Path) -> None:
    parquet.write_table(pa.table({"id": IDS[:PART], "found": [True] * PART}), path)


def from_elsewhere(**of_parts: Any) -> Callable[[Path, Path], None]:
    def damage(path: Path, folder: Path) -> None:
        path.write_bytes(write_two_parts(folder / "other.parquet", **of_parts)[0].read_bytes())

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        *(pytest.param(flipped(eighth / 7), id=f"bit {eighth}") for eighth in range(8)),
        pytest.param(lambda path, _: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path, _: path.write_bytes(path.read_bytes()[:-5]), id="a row short"),
        pytest.param(lambda path, _: path.write_bytes(path.read_bytes()[:100]), id="cut"),
        pytest.param(lambda path, _: path.write_bytes(path.read_bytes() * 2), id="twice"),
        pytest.param(as_parquet, id="no probabilities"),
        pytest.param(from_elsewhere(ids=IDS[::-1]), id="another order"),
        pytest.param(from_elsewhere(ids=[f"x{text}" for text in IDS]), id="other ids"),
        pytest.param(from_elsewhere(model="another model"), id="another model"),
        pytest.param(
            lambda path, _: path.with_name("00000001.splitveil-part").replace(path), id="moved"
        ),
    ],
)
def test_a_part_that_is_not_as_it_was_written_is_computed_again(
    tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    output = tmp_path / "all.parquet"
    first = write_two_parts(output)[0]
    assert opened(output).missing[0].start == 2 * PART
    damage(first, tmp_path)
    assert opened(output).missing[0].start == 0


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_of_the_user_s_or_a_link_to_one_is_refused_and_stays(
    tmp_path: Path, *, is_link: bool
) -> None:
    folder, elsewhere = tmp_path / "all.parquet.parts", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "plan.json").write_text("{}")
    if is_link:
        folder.symlink_to(elsewhere)
    else:
        elsewhere.rename(folder)
    with pytest.raises(StorageError, match="give --output another name"):
        opened(tmp_path / "all.parquet")
    assert [path.name for path in folder.iterdir()] == ["plan.json"]


def test_files_that_come_into_the_folder_meanwhile_are_not_deleted(tmp_path: Path) -> None:
    output = tmp_path / "all.parquet"
    parts = opened(output, ids=IDS[:PART])
    parts.write(parts.missing[0], np.zeros(PART, np.float32), np.ones(PART, np.bool_))
    (parts.folder / "notes").write_text("mine")
    with pytest.raises(StorageError, match="not empty"):
        parts.join()
    assert [path.name for path in parts.folder.iterdir()] == ["notes"]
    assert len(column(output)) == PART


@pytest.mark.parametrize("breaks_off", [False, True])
def test_a_passive_party_sees_the_same_messages_whatever_the_order_of_the_list(
    small: Trained,
    undisturbed: NDArray[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    breaks_off: bool,
) -> None:
    """A list may be sorted by label, and be cut into messages and parts at any place."""
    by_label = np.argsort(undisturbed, kind="stable")
    seen: list[list[list[str]]] = []
    reply: Callable[..., Any] = InferenceService._reply

    def noting(self: InferenceService, request: Any, context: Any) -> Any:
        seen[-1].append(list(request.ids))
        return reply(self, request, context)

    monkeypatch.setattr(InferenceService, "_reply", noting)
    for order in (np.arange(len(IDS)), by_label, by_label[::-1]):
        seen.append([])
        output, ids = tmp_path / "all.parquet", [IDS[row] for row in order]
        if breaks_off:
            with monkeypatch.context() as patch, predicting(small) as predictor:
                patch.setattr(Parts, "join", Parts.num_found)
                predict(predictor, output, ids=ids, most_parts=2)
        with predicting(small) as predictor:
            reported = predict(predictor, output, ids=ids)
        assert reported[0] == (2 * PART if breaks_off else 0)
        np.testing.assert_array_equal(column(output), undisturbed[order])
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > len(IDS) / REQUEST


def test_nothing_is_asked_for_a_prediction_that_is_finished_but_for_its_output(
    small: Trained, undisturbed: NDArray[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a full disk: all parts are there."""
    output = tmp_path / "all.parquet"

    def full(_: Parts) -> None:
        raise StorageError("full")

    with predicting(small) as predictor:
        with monkeypatch.context() as patch:
            patch.setattr(Parts, "join", full)
            with pytest.raises(StorageError):
                predict(predictor, output)
        failing_after(0, monkeypatch)
        assert predict(predictor, output) == [len(IDS)]
    np.testing.assert_array_equal(column(output), undisturbed)


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_asked(
    tmp_path: Path,
) -> None:
    with pytest.raises(SettingsError, match=r"\.parquet or \.csv"):
        check_output(tmp_path / "all.txt")
    with pytest.raises(SettingsError, match="no folder"):
        check_output(tmp_path / "absent" / "all.csv")


def test_ids_too_long_for_a_message_are_counted_and_not_quoted() -> None:
    check_lengths(["x" * 1024, "ä" * 512], "ids.txt")
    with pytest.raises(DataError, match=r"ids\.txt: 2 ids have more than 1,024 bytes"):
        check_lengths(["x" * 1025, "ä" * 513, "short"], "ids.txt")
