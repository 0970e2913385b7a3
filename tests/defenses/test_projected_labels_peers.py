"""Projected labels with peers and with tables that make it hard."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from splitveil.common.errors import DataError, SplitveilError
from splitveil.common.run.messages import Activation, Course
from splitveil.passive_party.bottom_trainer import BottomTrainer
from tests.support import simulation
from tests.support.peers import InProcessPeer
from tests.support.projected import MU, SMALL, assert_bounded, build, note_draws, refitted
from tests.support.runs import run_in_process, write_example

# ---- peers that choose what they send ----


class Overflowing(nn.Module):
    """Predicts no numbers of the largest finite activations: infinity less infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, activation: Tensor, _features: object) -> Tensor:
        return (activation * torch.tensor([10.0, -10.0, 10.0, -10.0])) @ self.weight


class Sends(InProcessPeer):
    """Sends other values than its model's, which may depend on the epoch and the split."""

    change: Callable[[Tensor, Activation], Tensor]

    def _changed(self, activation: Activation) -> Activation:
        change = type(self).__dict__["change"]
        return Activation(activation.batch, change(activation.values, activation))

    def send_activation(self, activation: Activation) -> None:
        super().send_activation(self._changed(activation))

    def evaluate(self, activation: Activation) -> Course:
        return super().evaluate(self._changed(activation))


def one_hot_rows(values: Tensor, _: Activation) -> Tensor:
    sent = torch.zeros_like(values)
    sent[::7, 0] = 1.0
    return sent


def grown_in_the_second_epoch(values: Tensor, sent: Activation) -> Tensor:
    return values * (-1e6 if sent.batch.epoch else 1.0)


def another_scale_for_each_row(values: Tensor, _: Activation) -> Tensor:
    return values * torch.logspace(-30, 20, len(values))[:, None]


CHOSEN: dict[str, Callable[[Tensor, Activation], Tensor]] = {
    "zeros": lambda values, _: torch.zeros_like(values),
    "one vector": lambda values, _: torch.full_like(values, 3.5),
    "collinear": lambda values, _: values[:, :1] * torch.tensor([1.0, -2.0, 0.5, 4.0]),
    "huge": lambda values, _: torch.full_like(values, 1e30),
    "huge of both signs": lambda values, _: values.sign() * 1e30,
    "denormal": lambda values, _: values.sign() * 1e-40,
    "one huge row": lambda values, _: torch.cat([values[:1] * 1e30, values[1:]]),
    "one-hot rows": one_hot_rows,
    "another scale for each row": another_scale_for_each_row,
    "grown between the stages": grown_in_the_second_epoch,
}


@pytest.mark.parametrize("chosen", CHOSEN)
def test_whatever_a_peer_sends_the_bound_holds_or_nothing_is_told(
    example: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    """The model may suffer: where it predicts nothing any more, the run ends with an error."""
    drawn = note_draws(monkeypatch)
    parties = build(example)
    try:
        run_in_process(parties, type("Chooses", (Sends,), {"change": CHOSEN[chosen]}))
    except SplitveilError as error:
        ended = str(error)
        charged = parties.session.leak_bounds().sum_kl.max
        assert charged == pytest.approx(MU**2 * len(drawn) / 2, rel=1e-4)
        assert "cannot" in ended
    else:
        assert_bounded(parties)
        assert drawn == [0, 1]


def test_predictions_that_are_no_numbers_end_the_run_before_anything_is_told(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = note_draws(monkeypatch)
    parties = build(example, f"top_model={{kind: custom, module: '{__name__}:Overflowing'}}")
    largest = {"change": lambda values, _: torch.full_like(values, 3e38)}
    with pytest.raises(SplitveilError, match=r"cannot begin a stage: .* not a number"):
        run_in_process(parties, type("Overflows", (Sends,), largest))
    assert drawn == []
    assert parties.active.sent == []
    assert parties.session.leak_bounds().sum_kl.max == 0


def test_a_survey_of_values_that_are_no_numbers_is_refused_on_the_wire(
    example: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = note_draws(monkeypatch)
    embed = BottomTrainer.embed
    monkeypatch.setattr(
        BottomTrainer, "embed", lambda self, features: embed(self, features) * float("nan")
    )
    parties = build(example)
    with pytest.raises(SplitveilError):
        simulation.meet_over_grpc(parties.simulation(), f"127.0.0.1:{port}")
    assert drawn == []
    assert parties.active.sent == []


# ---- tables and strengths that leave little ----


def test_without_one_of_the_classes_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_example(tmp_path)
    lines = (tmp_path / "active.csv").read_text().splitlines()
    (tmp_path / "active.csv").write_text("\n".join(line.replace(",1,", ",0,") for line in lines))
    drawn = note_draws(monkeypatch)
    with pytest.raises(DataError, match="class"):
        run_in_process(build(tmp_path))
    assert drawn == []


@pytest.mark.parametrize("rows", [30, 45])
def test_tiny_tables_run_to_their_end(tmp_path: Path, rows: int) -> None:
    write_example(tmp_path, rows=rows)
    both = [*SMALL, "contract.alignment={min_aligned: 5}"]
    parties = build(tmp_path, both=both)
    run_in_process(parties)
    assert_bounded(parties)
    assert all(bool(value.isfinite().all()) for value in refitted(parties).values())
