"""Defenses for tests: built from settings without a run, and a module of a user's own."""

from pathlib import Path

from splitveil.active_party.defenses import Defense, DefenseContext, DefenseSettings, Secrets
from splitveil.active_party.defenses.example_keys import NoiseKey
from splitveil.active_party.defenses.noise import DrawKeys


def context_of(cut_dim: int = 8, num_classes: int = 2, pos_fraction: float = 0.5) -> DefenseContext:
    return DefenseContext((cut_dim,), num_classes, pos_fraction)


def build_defense(
    settings: DefenseSettings,
    noise_key: NoiseKey | None = None,
    draw_keys: DrawKeys | None = None,
    num_classes: int = 2,
) -> Defense:
    """Build the defense that the settings name, for a batch of any width."""
    context = context_of(num_classes=num_classes)
    return settings.build(context, Secrets(noise_key, draw_keys))


OWN_DEFENSES = '''
"""Rows clipped to a length, and noise in units of that length."""

import torch

from splitveil.active_party.defenses import Charge, Defended, Defense, release


class Clipped(Defense):
    def __init__(self, context, noise, *, limit=1e-3, noise_ratio=2.0):
        if noise_ratio <= 0:
            raise ValueError("noise_ratio must be above 0")
        self._noise, self._limit, self._ratio = noise, limit, noise_ratio

    def clipped(self, batch):
        rows = batch.gradients.detach().flatten(start_dim=1)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows * (self._limit / norms.clamp(min=self._limit))

    def defend(self, batch):
        rows = self.clipped(batch)
        deviation = self._ratio * self._limit
        noise = self._noise.standard_normal(tuple(rows.shape), rows)
        # Two clipped rows are at most 2 limits apart, whatever the labels.
        charge = Charge(4 / self._ratio**2)
        sent = release(rows + deviation * noise, batch.gradients)
        return Defended(sent, charge, noise_power=rows.shape[1] * deviation**2)


class Uncharged(Clipped):
    """States no charge."""

    def defend(self, batch):
        answer = super().defend(batch)
        return Defended(answer.gradient, noise_power=answer.noise_power)


class Counting(Clipped):
    """Keeps a state, and halves the targets of the first batch."""

    def __init__(self, context, noise):
        super().__init__(context, noise)
        self._count = torch.zeros((), dtype=torch.int64)

    def targets(self, batch):
        return batch.labels if self._count else batch.labels / 2

    def defend(self, batch):
        self._count = self._count + 1
        return super().defend(batch)

    def state_dict(self):
        return {"count": self._count}

    def load_state_dict(self, state):
        self._count = state["count"]


class Keyed(Uncharged):
    """Needs the examples' keys."""

    def defend(self, batch):
        if batch.example_keys is None:
            raise ValueError("no keys")
        return super().defend(batch)


class Pair(Clipped):
    def defend(self, batch):
        return tuple(super().defend(batch))


class Narrow(Clipped):
    def defend(self, batch):
        answer = super().defend(batch)
        defended = answer.gradient
        return answer._replace(gradient=defended[:, :1])


class Infinite(Clipped):
    def defend(self, batch):
        answer = super().defend(batch)
        defended = answer.gradient
        return answer._replace(gradient=defended / 0.0)


class NeedsBothClasses(Clipped):
    def defend(self, batch):
        if len(set(batch.labels.tolist())) < 2:
            raise ValueError("expected two classes")
        return super().defend(batch)


class FailsLater(Clipped):
    """Fails on a batch of more rows than it is tried out on."""

    def defend(self, batch):
        answer = super().defend(batch)
        defended = answer.gradient
        return answer._replace(gradient=defended.double() if len(defended) > 8 else defended)


class NotADefense:
    pass
'''


def write_own_defenses(folder: Path, module: str = "own_defenses_of_tests") -> str:
    (folder / f"{module}.py").write_text(OWN_DEFENSES)
    return module
