"""Loads user-defined attacks, and tries each on a few rows before the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitveil.common.errors import SettingsError
from splitveil.common.privacy.attacks import Attack, Knowledge, SideInformation
from splitveil.common.privacy.gradient_rows import GradientRows, Gradients
from splitveil.common.privacy.scores import KnownClasses
from splitveil.common.privacy.settings import AuditSettings, CustomAttack
from splitveil.common.text.imports import fault_in_words, import_named, may_pass

PROBE_ROWS = 8


def load_custom_attacks(settings: AuditSettings) -> dict[str, Attack]:
    """Return the user-defined attacks in the settings, by name."""
    return {chosen.name: _load(chosen) for chosen in settings.custom_attacks}


def try_custom_attacks(settings: AuditSettings | None, row_shape: Sequence[int]) -> list[str]:
    """Load each user-defined attack, and have it score random gradients.

    Args:
        settings: settings of the audit; None for no audit.
        row_shape: shape of one example's gradient at the cut layer.

    Raises:
        SettingsError: a function cannot be imported, fails, does not return one finite number per
            row, changes its arguments or draws from torch's global generator.
    """
    if settings is None:
        return []
    for chosen in settings.custom_attacks:
        _probe(_load(chosen, is_trial=True), chosen, row_shape)
    return [chosen.name for chosen in settings.custom_attacks]


def _load(chosen: CustomAttack, *, is_trial: bool = False) -> Attack:
    function = import_named(chosen.module, "function")
    if not callable(function):
        raise SettingsError(f"{chosen.module}: expected a function, got {type(function).__name__}")
    needs = chosen.side_information
    num_hints = chosen.num_hints if SideInformation.HINTS in needs else 0
    names = tuple(Attack(function, needs).arguments.values())
    return Attack(_Scorer(chosen, function, names, is_trial), needs, num_hints)


@dataclass(frozen=True)
class _Scorer:
    """Calls the user's function, and checks its result."""

    chosen: CustomAttack
    function: Callable[..., object]
    names: tuple[str, ...]
    """Of its keyword arguments."""
    is_trial: bool

    def __call__(self, gradients: Gradients, *told: object) -> Tensor:
        rows = gradients.gradients if isinstance(gradients, GradientRows) else gradients
        try:
            with torch.no_grad():
                scores = self.function(rows, **dict(zip(self.names, told, strict=True)))
        except Exception as error:  # the user's function may raise anything
            if may_pass(error):
                raise
            # What a run tells it follows from labels, and so may the text of its errors.
            words = fault_in_words(error, shows_text=self.is_trial)
            raise self._refusal(f"fails on {len(rows)} rows: {words}") from error
        if not isinstance(scores, Tensor):
            raise self._refusal(f"expected a tensor of scores, got {type(scores).__name__}")
        if scores.shape != rows.shape[:1] or scores.is_complex():
            raise self._refusal(
                f"expected one real number for each of {len(rows)} rows, got "
                f"{scores.dtype} of shape {tuple(scores.shape)}"
            )
        if bool(scores.isnan().any()):
            raise self._refusal("expected scores without NaN")
        return scores.detach().double()

    def _refusal(self, reason: str) -> SettingsError:
        return SettingsError(f"attack {self.chosen.name} ({self.chosen.module}): {reason}")


def _probe(attack: Attack, chosen: CustomAttack, row_shape: Sequence[int]) -> None:
    with torch.random.fork_rng(devices=()):
        gradients, knowledge = _random_batch(attack, row_shape)
        before = _copies(gradients, knowledge)
        state = torch.get_rng_state()
        attack.score(gradients, knowledge)
        what = f"attack {chosen.name} ({chosen.module})"
        if not torch.equal(torch.get_rng_state(), state):
            raise SettingsError(
                f"{what}: draws from torch's global generator, which training uses; "
                "use a generator of its own"
            )
        if not all(map(torch.equal, before, _tensors(gradients, knowledge))):
            raise SettingsError(f"{what}: changes its arguments, which training uses")


def _random_batch(attack: Attack, row_shape: Sequence[int]) -> tuple[Tensor, Knowledge]:
    generator = torch.Generator().manual_seed(0)

    def draw(num_rows: int) -> Tensor:
        return torch.randn(num_rows, *row_shape, generator=generator)

    classes = KnownClasses(draw(PROBE_ROWS // 2), draw(PROBE_ROWS // 2))
    known = Knowledge(draw(1)[0], draw(max(attack.num_hints, 1)), classes, draw(PROBE_ROWS))
    return draw(PROBE_ROWS), known


def _tensors(gradients: Tensor, known: Knowledge) -> list[Tensor]:
    told = [known.positive_gradient, known.hints, *(known.classes or ()), known.activations]
    return [gradients, *(one for one in told if one is not None)]


def _copies(gradients: Tensor, known: Knowledge) -> list[Tensor]:
    return [one.clone() for one in _tensors(gradients, known)]
