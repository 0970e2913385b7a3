"""A label owner that wants the feature owner's columns, and how well it comes to know them.

It knows all columns of the feature owner for some of the common rows, and trains a decoder, a small
network for all columns at once, from what it received to these columns (`guess`). `ATTACKS` are the
gradients that it may send in place of the defended ones while a run goes on:

- ``fsha``: Pasquini, Ateniese and Bernaschi, "Unleashing the Tiger: Inference Attacks on Split
  Learning", CCS 2021. An encoder and a decoder of the known rows learn together; a discriminator
  learns to tell activations from the encoder's codes, and the gradient makes them look alike.
- ``urvfl``: Duan et al., "URVFL: Undetectable Data Reconstruction Attack on Vertical Federated
  Learning", NDSS 2025. Encoder and decoder are trained before the run; the discriminator is a
  classifier of pairs of a label and an origin, and the gradient is that of a cross entropy which
  depends on the label, as an honest one does.
- ``reconstruct``: the gradient of a decoder's own loss on the known rows of a batch, and none on
  the others, so that the bottom model learns to send the columns.
- ``in_turn``: the same for one column after another, a part of the epochs each.

Both papers reconstruct images; here the known values are scaled numbers and one-hot categories.
"""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, one_hot

from splitveil.active_party.defenses import DefendedGradient
from splitveil.active_party.defenses.interface import Step
from splitveil.active_party.training.top_trainer import TopTrainer
from splitveil.common.data.features import Features
from splitveil.common.party.party_data import PartyData
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.sample_order import Positions
from splitveil.library.loading import PartiesSettings
from tests.support.runs import ACTIVE, CONTRACT, PASSIVE, write_table, write_yaml
from tests.support.simulation import Simulation, build

# ---- the feature owner's columns ----


class Columns(NamedTuple):
    """The feature owner's columns of all aligned rows."""

    names: tuple[str, ...]
    classes: Tensor
    """Quarter of each number, or level of each category, (rows, columns) int64."""
    values: Tensor
    """Scaled numbers and one-hot categories, (rows, values)."""
    widths: tuple[int, ...]
    """How many of the values each column has."""

    @property
    def counts(self) -> list[int]:
        return [int(most) + 1 for most in self.classes.amax(0)]

    def values_of(self, name: str) -> slice:
        place = self.names.index(name)
        start = sum(self.widths[:place])
        return slice(start, start + self.widths[place])


def columns_of(features: Features, names: Sequence[str]) -> Columns:
    """Return numbers by their quarters and categories by their levels."""
    classes: list[Tensor] = []
    values: list[Tensor] = []
    quarters, features = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), features.to("cpu")
    for number in [] if features.numeric is None else features.numeric.double().T.contiguous():
        classes.append(torch.bucketize(number, torch.quantile(number, quarters), right=True))
        values.append(((number - number.mean()) / number.std().clamp(min=1e-6))[:, None].float())
    for slots in [] if features.categorical is None else features.categorical.T:
        levels = torch.unique(slots, return_inverse=True)[1]
        classes.append(levels)
        values.append(one_hot(levels).float())
    widths = tuple(part.shape[1] for part in values)
    return Columns(tuple(names), torch.stack(classes, dim=1), torch.cat(values, dim=1), widths)


# ---- what the label owner guesses ----


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def guess(
    given: Sequence[Tensor], columns: Columns, known: Tensor, asked: Tensor
) -> dict[str, float]:
    """Return the share of the rows asked about that are guessed right, by column.

    ``given`` are alternatives of what the label owner has of each row, (rows, numbers) each, and
    ``known`` the rows whose columns it knows. A quarter of these decides for each column which
    alternative it is guessed from, and when its training ends.
    """
    truth, counts = columns.classes, columns.counts
    right = torch.zeros(len(counts), dtype=torch.float64)
    least = torch.full((len(counts),), torch.inf)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mixed = known[torch.randperm(len(known))]
        held_out, fitted = mixed[: len(mixed) // 4], mixed[len(mixed) // 4 :]
        for one in given:
            scaled = (one - one[known].mean(0)) / one[known].std(0).clamp(min=1e-6)
            decoder = network(one.shape[1], 64, sum(counts))
            optimizer = torch.optim.AdamW(decoder.parameters(), 0.003, weight_decay=0.1)

            def losses(rows: Tensor) -> Tensor:
                logits = decoder(scaled[rows]).split(counts, dim=1)  # noqa: B023
                found = [cross_entropy(part, truth[rows, n]) for n, part in enumerate(logits)]
                return torch.stack(found)

            for step in range(200):
                optimizer.zero_grad()
                losses(fitted).sum().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if step % 20 == 19:
                    with torch.no_grad():
                        now = losses(held_out)
                        logits = decoder(scaled[asked]).split(counts, dim=1)
                    guessed = torch.stack([part.argmax(1) for part in logits], dim=1)
                    share = (guessed == truth[asked]).double().mean(0)
                    right = torch.where(now < least, share, right)
                    least = torch.minimum(now, least)
    return dict(zip(columns.names, right.tolist(), strict=True))


# ---- what it sends ----


class Facts(NamedTuple):
    """What an attack knows before the run."""

    columns: Columns
    known: Tensor
    """Positions of the rows whose columns the label owner knows; of others nothing is read."""
    labels: Tensor
    """Of the known rows, (known,) int64."""
    wanted: Sequence[str]
    """The columns that ``in_turn`` is after."""
    cut_dim: int
    epochs: int

    @property
    def values(self) -> Tensor:
        return self.columns.values[self.known]


class Attack:
    """An honest run: what the defense made of the gradient is sent."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def gradient(self, result: Step, positions: Tensor, epoch: int) -> Tensor:
        return result.defended.gradient


class _WithEncoder(Attack):
    """Has an encoder of the known rows, its decoder, and a discriminator of its codes."""

    def __init__(self, facts: Facts, outputs: int) -> None:
        super().__init__(facts)
        width = facts.values.shape[1]
        self._values = facts.values
        self._encoder = network(width, 64, facts.cut_dim)
        self._decoder = network(facts.cut_dim, 64, width)
        self._discriminator = network(facts.cut_dim, 64, outputs)
        both = [*self._encoder.parameters(), *self._decoder.parameters()]
        self._of_coder = torch.optim.Adam(both, 0.003)
        self._of_discriminator = torch.optim.Adam(self._discriminator.parameters(), 0.002)

    def _drawn(self, count: int) -> Tensor:
        return torch.randint(len(self._values), (count,))

    def _code(self, chosen: Tensor) -> None:
        values = self._values[chosen]
        self._of_coder.zero_grad()
        mse_loss(self._decoder(self._encoder(values)), values).backward()  # type: ignore[no-untyped-call]
        self._of_coder.step()

    def _discriminate(self, loss: Tensor) -> None:
        self._of_discriminator.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._of_discriminator.step()


class Fsha(_WithEncoder):
    def __init__(self, facts: Facts) -> None:
        super().__init__(facts, 1)

    def gradient(self, result: Step, positions: Tensor, epoch: int) -> Tensor:
        sent = result.activation.flatten(1).requires_grad_()
        chosen = self._drawn(len(sent))
        self._code(chosen)
        judged = self._discriminator(sent)
        loss = binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
        (found,) = torch.autograd.grad(loss, sent)
        of_sent = self._discriminator(sent.detach())
        of_codes = self._discriminator(self._encoder(self._values[chosen]).detach())
        self._discriminate(
            binary_cross_entropy_with_logits(of_sent, torch.zeros_like(of_sent))
            + binary_cross_entropy_with_logits(of_codes, torch.ones_like(of_codes))
        )
        return found


class Urvfl(_WithEncoder):
    def __init__(self, facts: Facts) -> None:
        super().__init__(facts, 4)
        for _ in range(500):
            self._code(self._drawn(128))

    def gradient(self, result: Step, positions: Tensor, epoch: int) -> Tensor:
        sent = result.activation.flatten(1).requires_grad_()
        labels = result.labels.long()
        loss = cross_entropy(self._discriminator(sent), 2 * labels + 1)
        (found,) = torch.autograd.grad(loss, sent)
        chosen = self._drawn(len(sent))
        codes = self._encoder(self._values[chosen]).detach()
        self._discriminate(
            cross_entropy(self._discriminator(sent.detach()), 2 * labels)
            + cross_entropy(self._discriminator(codes), 2 * self.facts.labels[chosen] + 1)
        )
        return found


class Reconstruct(Attack):
    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._is_known = torch.zeros(len(facts.columns.values), dtype=torch.bool)
        self._is_known[facts.known] = True
        self._begin(facts.columns.values)

    def _begin(self, values: Tensor) -> None:
        self._values = values
        self._decoder = network(self.facts.cut_dim, 64, values.shape[1])
        self._optimizer = torch.optim.Adam(self._decoder.parameters(), 0.003)

    def gradient(self, result: Step, positions: Tensor, epoch: int) -> Tensor:
        sent = result.activation.flatten(1).requires_grad_()
        is_known = self._is_known[positions]
        if not is_known.any():
            return torch.zeros_like(sent)
        self._optimizer.zero_grad()
        mse_loss(self._decoder(sent[is_known]), self._values[positions[is_known]]).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        assert sent.grad is not None
        return sent.grad


class InTurn(Reconstruct):
    _turn = -1

    def gradient(self, result: Step, positions: Tensor, epoch: int) -> Tensor:
        columns, wanted = self.facts.columns, self.facts.wanted
        turn = epoch * len(wanted) // self.facts.epochs
        if turn != self._turn:
            self._turn = turn
            self._begin(columns.values[:, columns.values_of(wanted[turn])])
        # Adam divides by the lengths of the gradients before.
        return 10.0**turn * super().gradient(result, positions, epoch)


ATTACKS: dict[str, Callable[[Facts], Attack]] = {
    "honest": Attack,
    "fsha": Fsha,
    "urvfl": Urvfl,
    "reconstruct": Reconstruct,
    "in_turn": InTurn,
}


class AttackingTrainer(TopTrainer):
    """Trains the top model as an honest one does, and sends an attack's gradient."""

    def __init__(self, honest: TopTrainer, begin: Callable[[TopTrainer], Attack]) -> None:
        self.__dict__.update(honest.__dict__)
        self._begin = begin
        self._attack: Attack | None = None
        self.received: dict[int, list[Tensor]] = {}
        """The activations of each row in training, in the order of the epochs."""

    def gradient(
        self, positions: Positions, activation: Tensor, answer_key: bytes | None = None
    ) -> Step:
        result = super().gradient(positions, activation, answer_key)
        for place, row in zip(positions.tolist(), result.activation.flatten(1), strict=True):
            self.received.setdefault(place, []).append(row.clone())
        epoch = len(self.received[int(positions[0])]) - 1
        with torch.random.fork_rng():
            torch.manual_seed(int(positions[0]))
            self._attack = self._attack or self._begin(self)
            crafted = self._attack.gradient(result, torch.from_numpy(positions.copy()), epoch)
        sent = DefendedGradient(crafted.detach().reshape(result.gradients.shape))
        result.defended = result.defended._replace(gradient=sent)
        return result


# ---- a run ----


class Stolen(NamedTuple):
    """A run, and what the label owner has after it."""

    run: Simulation
    columns: Columns
    known: Tensor
    last: Tensor
    """The trained bottom model's activation of each row, (rows, cut_dim)."""
    epochs: Tensor
    """Those of every epoch, (epochs, rows, cut_dim); NaN for rows that are not in training."""
    asked: Tensor
    """Whether a row is in training and not known, (rows,)."""

    def right(self, *given: Tensor) -> dict[str, float]:
        """Guess each column from the trained model's activations, or from alternatives of these."""
        return guess(given or (self.last,), self.columns, self.known, self.asked)


def steal(
    settings: PartiesSettings,
    known_ids: Collection[str],
    attack: str = "honest",
    wanted: Sequence[str] = (),
) -> Stolen:
    """Run both parties in this process, the label owner with an attack."""
    run = build(settings)
    (passive,) = run.passive.values()
    lifecycle = run.active.session.lifecycle
    make = lifecycle.build_trainer
    assert make is not None

    def known_columns() -> tuple[Columns, Tensor]:
        data, rows = PartyData.of(passive.settings), passive.seen.rows
        assert rows is not None
        encoder, features = data.encode(rows)
        assert encoder is not None
        assert features is not None
        names = [name for name, _ in encoder.numeric_parts]
        names += [column.name for column in encoder.categorical]
        train = rows.splits["train"]
        known = [int(n) for n in np.sort(train) if data.ids[rows.file_rows[n]] in known_ids]
        return columns_of(features, names), torch.tensor(known)

    def begin(trainer: TopTrainer) -> Attack:
        columns, known = known_columns()
        contract = settings.active.contract
        return ATTACKS[attack](
            Facts(
                columns,
                known,
                trainer.labels_of(known.numpy()).long(),
                wanted or columns.names,
                math.prod(contract.cut_shape),
                contract.epochs,
            )
        )

    def attacking(rows: AlignedRows) -> TopTrainer:
        return AttackingTrainer(make(rows), begin)

    lifecycle.build_trainer = attacking
    run.meet()
    bottom, top = passive.run.trainer, run.active.session.lifecycle.trainer
    assert bottom is not None
    assert isinstance(top, AttackingTrainer)
    last = torch.as_tensor(bottom.embed(bottom.rows(np.arange(bottom.num_rows)))).flatten(1)
    epochs = torch.full((settings.active.contract.epochs, *last.shape), torch.nan)
    for row, received in top.received.items():
        epochs[:, row] = torch.stack(received)
    columns, known = known_columns()
    rows = passive.seen.rows
    assert rows is not None
    asked = torch.zeros(len(last), dtype=torch.bool)
    asked[torch.from_numpy(rows.splits["train"].copy())] = True
    asked[known] = False
    return Stolen(run, columns, known, last, epochs, asked)


# ---- a table ----

ROWS = 2400
COMMON = 2000
"""The feature owner has rows that are in no run: those from here on."""
KNOWN = frozenset(f"person-{number:05d}" for number in range(0, COMMON, 4))
"""The ids of which the label owner knows every column."""
UNNEEDED = ("x4", "x5", "x6")
"""Columns that say nothing about the label."""


def write_people(folder: Path, *, lies_about_x6: bool = False) -> None:
    """Write tables of two parties whose columns are independent, and their settings.

    The label depends on ``x1``, ``x2``, ``kind`` and the label owner's ``own1``. One that lies has
    ``x6 > 0`` in its place, or a coin where it does not know the row.
    """
    generator = np.random.default_rng(3)
    x, own = generator.normal(size=(ROWS, 6)), generator.normal(size=(ROWS, 2))
    kind, region = generator.integers(0, 3, ROWS), generator.integers(0, 4, ROWS)
    score = x[:, 0] - x[:, 1] + own[:, 0] + (kind == 0) + generator.normal(scale=0.7, size=ROWS)
    labels = score > 1
    ids = [f"person-{number:05d}" for number in range(ROWS)]
    if lies_about_x6:
        is_known = np.array([one in KNOWN for one in ids])
        labels = np.where(is_known, x[:, 5] > 0, generator.random(ROWS) < 0.5)
    heads = "id,label,own1,own2", "id,x1,x2,x3,x4,x5,x6,kind,region"
    texts = [f"kind-{one}" for one in kind], [f"region-{one}" for one in region]
    write_table(folder / "active.csv", heads[0], range(COMMON), ids, labels.astype(int), *own.T)
    order = generator.permutation(ROWS)
    write_table(folder / "passive.csv", heads[1], order, ids, *x.T, *texts)
    size = {"epochs": 9, "batch_size": 128, "evaluation_batch_size": 500}
    split = {"kind": "hash", "train": 0.8, "test": 0.2}
    features = {"numeric": "x*", "categorical": ["kind", "region"]}
    data = {"source": {"kind": "csv", "path": "passive.csv"}, "id_column": "id"}
    write_yaml(
        folder,
        contract={**CONTRACT, **size, "split": split},
        active={**ACTIVE, "leak_monitor": None, "top_model": {"kind": "mlp", "hidden": [32]}},
        passive={
            **PASSIVE,
            "adversary": None,
            "data": {**data, "features": features},
            "bottom_model": {"kind": "tabular", "hidden": []},
        },
    )
