"""Plans a run: what it will reveal about labels and columns, before any training."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from splitveil.active_party.commands.plan import show
from splitveil.active_party.planned import Plan, plan_of
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import SettingsError
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.contract import ACTIVE
from splitveil.deploy.overrides import Overrides, override
from splitveil.library.choices import DefenseChoice, model_settings, named_defense
from splitveil.library.frames import Frame, Row, Tabular, frame, printed
from splitveil.library.loading import Scratch, from_here, naming_parties, source_of
from splitveil.passive_party.exposure_plan import ExposurePlan, exposure_plan_of
from splitveil.passive_party.exposure_plan import show as show_exposure
from splitveil.passive_party.settings import PassiveSettings


class RunPlan(Tabular):
    """A forecast of what a run would reveal about the labels."""

    def __init__(self, plan: Plan) -> None:
        self.figures = plan

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences about the reliability of the figures, other signals and the budget."""
        return self.figures.remarks

    def frame(self) -> Frame:
        """Return one row for one answer and one for all answers, for each kind of noise.

        A figure has two columns, the least that it may be (``..._least``) and the most; they are
        equal where ``certainty`` is ``exact``, and missing where it is ``unknown``. A bound is
        missing where there is none for these peers. Without pandas it is a ``pyarrow.Table``.
        """
        return frame(self.figures.rows())

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values, as ``splitveil plan active.yaml --json`` prints them."""
        return self.figures.to_json()

    def __repr__(self) -> str:
        return printed(partial(show, self.figures))

    def _table(self) -> tuple[str, Sequence[Row], str]:
        title = f"defense {self.figures.defense}: what the peer may learn of one example"
        return title, self.figures.rows(), " ".join(self.remarks)


class RunExposure(Tabular):
    """The measured disclosure of a feature owner's columns by a run before it begins."""

    def __init__(self, plan: ExposurePlan) -> None:
        self.figures = plan

    def frame(self) -> Frame:
        """Return one row for each width and column: right guesses with and without what is sent."""
        return frame(self.figures.rows())

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values, as ``splitveil plan --json`` prints them."""
        return self.figures.to_json()

    def __repr__(self) -> str:
        return printed(partial(show_exposure, self.figures))

    def _table(self) -> tuple[str, Sequence[Row], str]:
        return "what a run may give away of the columns", self.figures.rows(), ""


def exposure_plan(
    example: str | Path, *, settings: Mapping[str, Any] | None = None, party: str = "passive"
) -> RunExposure:
    """Measure what a run would give away of a feature owner's columns; nothing is sent.

    Args:
        example: the name of an example of the package, a folder with the feature owner's settings
            file, or that file.
        settings: settings of that party and of the contract to override:
            ``{"contract.cut_shape": [4]}``.
        party: the feature owner's file in the folder, without ``.yaml``.

    Raises:
        SplitveilError: settings or data cannot be used, or there are too few rows.
    """
    path, scratch = Path(example), Scratch()
    if not path.is_file():
        if not (path / f"{party}.yaml").is_file():
            path = source_of(example, scratch.path, None, None)
        path /= f"{party}.yaml"
    overrides = [override(name, model_settings(one)) for name, one in (settings or {}).items()]
    own = load_party_settings(PassiveSettings, path, overrides)
    return RunExposure(exposure_plan_of(own, PartyData.of(own)))


def plan(
    example: str | Path | None = None,
    *,
    active: Any = None,
    label: str = "label",
    key: str | None = "",
    label_range: tuple[float, float] | None = None,
    positive_label: str | float | Sequence[str | float] | None = None,
    defense: DefenseChoice | None = None,
    target_leak_auc: float | None = None,
    settings: Mapping[str, Any] | None = None,
) -> RunPlan:
    """Forecast what a run would reveal about the labels; nothing is trained.

    Args:
        example: the name of an example of the package, a folder with ``active.yaml``, or the
            active party's settings file; this, or ``active``.
        active: the label owner's table; it, ``label``, ``key``, ``label_range`` and
            ``positive_label`` are as for ``simulate``.
        defense: by default the settings' own.
        target_leak_auc: also find the power ratio of ``marvell`` at which the whole run stays below
            this AUC.
        settings: settings of the active party and of the contract to override:
            ``{"contract.epochs": 3}``. With ``active``, paths are relative to the current folder.

    Returns:
        The plan: a frame of its figures, remarks, and a printed form.

    Raises:
        SplitveilError: settings or data cannot be used.
        ValueError: neither an example nor a table is given, or both.
    """
    given = from_here(settings or {}) if active is not None else dict(settings or {})
    texts = [override(name, model_settings(value)) for name, value in given.items()]
    if defense is not None:
        chosen = named_defense(defense).overrides
        texts += [one for one in chosen if not one.startswith("passive.")]
    overrides = Overrides(texts)
    if overrides.owners() - {ACTIVE, "contract"}:
        raise SettingsError("settings: a plan reads those of the active party and the contract")
    scratch = Scratch()  # deleted when the data have been read
    path = Path(example) if example is not None else None
    if path is None or not path.is_file():
        labels = {"label_range": label_range, "positive_label": positive_label}
        folder = source_of(example, scratch.path, active, None, label=label, key=key, **labels)
        path = folder / "active.yaml"
    elif active is not None:
        raise ValueError("expected an example, or the table active")
    with naming_parties(path.parent) if active is not None else nullcontext():
        own = load_party_settings(ActiveSettings, path, overrides.of(ACTIVE))
        return RunPlan(plan_of(own, PartyData.of(own), target_leak_auc))
