"""What a label owner learns of the feature owner's columns, honest or not, in a run with gradients.

The columns are independent of each other, and three of them of the label, so that nothing is
guessed which was not sent: quarters of a number are guessed right for 1 row in 4.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import torch

from splitveil.common.models.settings import bins_of
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.model_files import identity_metadata, save_model
from splitveil.passive_party.predict.served_model import ServedModel
from tests.support.label_owner import (
    COMMON,
    KNOWN,
    UNNEEDED,
    Stolen,
    columns_of,
    guess,
    steal,
    write_people,
)
from tests.support.runs import CPU
from tests.support.simulation import read_settings

GUESSED = 0.25
WIDE, NARROW = 64, 1

Run = Callable[..., Stolen]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Run:
    @cache
    def table(*, lies: bool) -> Path:
        folder = tmp_path_factory.mktemp("people")
        write_people(folder, lies_about_x6=lies)
        return folder

    @cache
    def run(
        cut: int,
        attack: str = "honest",
        *changed: str,
        lies: bool = False,
        defense: str = "none",
        bottom: str = "tabular, hidden: []",
    ) -> Stolen:
        folder = table(lies=lies)
        both = [f"contract.cut_shape=[{cut}]", f"runs_dir={folder / str(cut)}", *changed]
        own, other = f"defense={{name: {defense}}}", f"bottom_model={{kind: {bottom}}}"
        settings = read_settings(folder, [*both, own], [*both, other])
        return steal(settings, KNOWN, attack, UNNEEDED)

    return run


def unneeded(right: dict[str, float]) -> float:
    """Return the mean share of right guesses over the columns that the label does not need."""
    return mean(right[name] for name in UNNEEDED)


def test_a_wide_cut_gives_every_column_to_who_knows_some_rows(run_of: Run) -> None:
    """Also those that say nothing about the label: an untrained projection keeps them."""
    right = run_of(WIDE).right()
    assert min(right.values()) > 0.5
    assert mean(right.values()) > 0.75
    shuffled = run_of(WIDE).last[torch.randperm(len(run_of(WIDE).last))]
    assert mean(run_of(WIDE).right(shuffled).values()) < 0.31  # the decoder invents nothing


def test_a_narrow_cut_gives_what_the_label_needs_and_more_of_it_over_all_epochs(
    run_of: Run,
) -> None:
    stolen = run_of(NARROW)
    last, every = stolen.right(), stolen.right(stolen.epochs.permute(1, 0, 2).flatten(1))
    assert unneeded(last) < GUESSED + 0.04
    assert unneeded(every) < GUESSED + 0.04
    assert last["x1"] > GUESSED + 0.1
    assert every["x2"] > last["x2"] + 0.05


def test_labels_that_are_a_column_teach_the_bottom_model_to_send_it(run_of: Run) -> None:
    """The label owner's table is read by its own unchanged code, and every check passes."""
    right = run_of(NARROW, lies=True).right()
    assert right["x6"] > GUESSED + 0.15
    assert right["x6"] > run_of(NARROW).right()["x6"] + 0.15


TURNS = [2, 5, 8]  # the last epoch of each column's turn


def test_crafted_gradients_bring_columns_that_no_label_needs(run_of: Run) -> None:
    """One number per row, and one column after another: the epochs together have all three."""
    honest, stolen = run_of(NARROW), run_of(NARROW, "in_turn")
    assert unneeded(honest.right(*honest.epochs[TURNS])) < GUESSED + 0.04
    assert unneeded(stolen.right(*stolen.epochs[TURNS])) > GUESSED + 0.2
    parties = honest.run.passive["passive"], stolen.run.passive["passive"]
    assert parties[0].seen.epochs == parties[1].seen.epochs  # every step was taken


def test_published_attacks_gain_less_than_one_column_after_another(run_of: Run) -> None:
    fsha, urvfl = (unneeded(run_of(NARROW, one).right()) for one in ("fsha", "urvfl"))
    in_turn = run_of(NARROW, "in_turn")
    most = unneeded(in_turn.right(*in_turn.epochs[TURNS]))
    assert GUESSED + 0.03 < fsha < most - 0.1
    assert urvfl < most - 0.1


ONE_SHOT = "contract.exchange=one_shot"


def test_where_nothing_is_sent_back_lies_and_crafted_gradients_change_no_bit(run_of: Run) -> None:
    honest = run_of(4, "honest", ONE_SHOT, bottom="pca")
    for attack, lies in (("in_turn", False), ("honest", True)):
        stolen = run_of(4, attack, ONE_SHOT, bottom="pca", lies=lies)
        assert torch.equal(stolen.last, honest.last)
        assert stolen.epochs.isnan().all()  # it was asked for no gradient
    gradients = run_of(4), run_of(4, lies=True)
    assert not torch.equal(gradients[0].last, gradients[1].last)


def test_a_score_that_is_fitted_to_noisy_labels_still_follows_a_lie(run_of: Run) -> None:
    """The noise is the label owner's own, and as weak as the settings allow."""
    weakest = "noisy_label, mechanism: {kind: gaussian, noise_ratio: 0.01}, insecure_noise_seed: 7"
    released = (ONE_SHOT, "contract.release=noisy_labels")
    given = {"defense": weakest, "bottom": "score"}
    honest, lie = (
        run_of(NARROW, "honest", *released, lies=lies, **given).right()["x6"]
        for lies in (False, True)
    )
    assert honest < GUESSED + 0.04
    assert lie > GUESSED + 0.15


@pytest.mark.parametrize(("cut", "is_known"), [(WIDE, True), (NARROW, False)])
def test_rows_asked_for_in_predictions_are_known_like_those_in_training(
    run_of: Run, tmp_path: Path, cut: int, is_known: bool
) -> None:
    """The decoder is of the run, and the rows are new; a list of allowed ids keeps them back."""
    stolen = run_of(cut)
    passive = stolen.run.passive["passive"]
    settings, rows, bottom = passive.settings, passive.seen.rows, passive.run.trainer
    assert rows is not None
    assert bottom is not None
    data = PartyData.of(settings)
    encoder, _ = data.encode(rows, None, bins_of(settings.bottom_model))
    assert encoder is not None
    identity = identity_metadata(passive.run.model_identity, settings.contract)
    folder = settings.run_folder(settings.folder_name())
    folder.mkdir(parents=True)
    save_model(folder, bottom.model, encoder, identity)
    new = [n for n, name in enumerate(data.ids) if name >= f"person-{COMMON:05d}"]
    names = [data.ids[n] for n in new]
    answer = ServedModel.load(settings, CPU).embed(names)
    assert answer.known.all()
    features = encoder.transform(data.table, np.concatenate([rows.file_rows, new]))
    columns = columns_of(features, stolen.columns.names)
    asked = torch.arange(len(columns.classes)) >= len(rows)
    given = torch.cat([stolen.last, answer.values.flatten(1)])
    right = guess([given], columns, stolen.known, asked)
    assert unneeded(right) > 0.6 if is_known else unneeded(right) < GUESSED + 0.06
    allowed = tmp_path / "allowed.txt"
    allowed.write_text("\n".join(stolen.run.active.session.ids))
    answers = settings.answers.model_copy(update={"allowed_ids": str(allowed)})
    limited = settings.model_copy(update={"answers": answers})
    assert not ServedModel.load(limited, CPU).embed(names).known.any()
