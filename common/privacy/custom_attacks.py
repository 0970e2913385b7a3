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
    return {chosen.name: _load(chosen) for chosen in settings.custom_attacks}


def try_custom_attacks(settings: AuditSettings | None, row_shape: Sequence[int]) -> list[str]:
    """Load each user-defined attack, and have it score random gradients.

    Raises SettingsError if one cannot be imported, fails, does not return one finite number per
    row, changes its arguments or draws from torch's global generator.
    """
    if settings is None:
        return []
    for chosen in settings.custom_attacks:
        attack, generator = _load(chosen, is_trial=True), torch.Generator().manual_seed(0)
        half, num_hints = PROBE_ROWS // 2, max(attack.num_hints, 1)
        drawn = [
            torch.randn(number, *row_shape, generator=generator)
            for number in (half, half, 1, num_hints, PROBE_ROWS, PROBE_ROWS)
        ]
        negatives, positives, reference, hints, activations, gradients = drawn
        classes = KnownClasses(negatives, positives)
        before = [values.clone() for values in drawn]
        what = f"attack {chosen.name} ({chosen.module})"
        with torch.random.fork_rng(devices=()):
            state = torch.get_rng_state()
            attack.score(gradients, Knowledge(reference[0], hints, classes, activations))
            if not torch.equal(torch.get_rng_state(), state):
                raise SettingsError(
                    f"{what}: draws from torch's global generator, which training uses; "
                    "use a generator of its own"
                )
        if not all(map(torch.equal, before, drawn)):
            raise SettingsError(f"{what}: changes its arguments, which training uses")
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
    chosen: CustomAttack
    function: Callable[..., object]
    names: tuple[str, ...]  # of its keyword arguments
    is_trial: bool

    def __call__(self, gradients: Gradients, *known: object) -> Tensor:
        rows = gradients.gradients if isinstance(gradients, GradientRows) else gradients
        try:
            with torch.no_grad():
                scores = self.function(rows, **dict(zip(self.names, known, strict=True)))
        except Exception as error:  # the user's function may raise anything
            if may_pass(error):
                raise
            # What it learns in a run follows from labels, and so may the text of its errors.
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
