"""Observers that keep all events: losses, gradients, evaluations and the ledger."""

from dataclasses import dataclass, field

from torch import Tensor

from splitveil.active_party.ledger.bounds import LeakBounds
from splitveil.active_party.training.evaluation import Evaluation
from splitveil.active_party.training.top_trainer import StepResult
from splitveil.common.errors import SplitveilError
from splitveil.common.run.course import AlignedRows, Batch
from splitveil.common.run.messages import AuditQuestion


@dataclass
class Recording:
    """The events that the observers of both parties keep.

    The state that goes into a checkpoint is the length of every list. Restoring it shortens the
    lists to what they held then, so that a resumed run leaves one recording without repeats.
    """

    rows: AlignedRows | None = None
    epochs: list[int] = field(default_factory=list)
    resumed: list[int | None] = field(default_factory=list)
    """The epoch in which each resumption continued; None at the end of the run. Never shortened."""

    def on_aligned(self, rows: AlignedRows, seed: bytes) -> None:
        self.rows = rows

    def on_resumed(self, epoch: int | None) -> None:
        self.resumed.append(epoch)

    def on_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def state_dict(self) -> dict[str, int]:
        return {name: len(seen) for name, seen in vars(self).items() if isinstance(seen, list)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Forget events after the state; earlier events of another process are unknown here."""
        for name, count in state.items():
            if name != "resumed":
                del getattr(self, name)[count:]


@dataclass
class ActiveRecording(Recording):
    losses: list[float] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)
    """The defended gradient of every training batch, (batch, *cut_shape)."""

    evaluations: list[Evaluation] = field(default_factory=list)
    ledger: list[tuple[int, LeakBounds]] = field(default_factory=list)
    """The epoch, and the bounds on all answers up to its end."""

    audits: list[tuple[AuditQuestion, float]] = field(default_factory=list)
    """Scores that a passive party had measured, and the leak AUC that it was told."""

    audits_answered: int = 0
    """The number of audits that were answered; never reduced."""

    earlier: tuple[int, LeakBounds] | None = None
    """The number of examples about which earlier runs answered, and the bounds on these answers."""

    ahead: tuple[LeakBounds, ...] = ()
    """The bounds on all answers, at each resumption before some of them; never shortened."""

    def on_step(self, batch: Batch, result: StepResult) -> None:
        self.losses.append(float(result.loss.detach()))
        self.sent.append(result.defended.clone())

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def on_earlier_answers(self, examples: int, bounds: LeakBounds) -> None:
        self.earlier = (examples, bounds)

    def on_ledger(self, epoch: int, bounds: LeakBounds) -> None:
        self.ledger.append((epoch, bounds))

    def on_answers_ahead(self, bounds: LeakBounds) -> None:
        self.ahead += (bounds,)

    def on_audit(self, question: AuditQuestion, leak_auc: float, party: str) -> None:
        self.audits.append((question, leak_auc))

    def on_audits_answered(self, count: int) -> None:
        self.audits_answered = count

    def objection(self) -> SplitveilError | None:
        return None


@dataclass
class PassiveRecording(Recording):
    received: list[Tensor] = field(default_factory=list)
    """The gradient that came back for every training batch, (batch, *cut_shape)."""

    layers: list[dict[str, Tensor]] = field(default_factory=list)
    """The gradients at the layers before the cut that are tapped, by name."""

    def on_opened(self, run_id: str) -> None: ...

    def on_alignment_progress(self, done_ids: int, total_ids: int) -> None: ...

    def on_step(
        self, batch: Batch, sent: Tensor, received: Tensor, layers: dict[str, Tensor]
    ) -> None:
        self.received.append(received.clone())
        self.layers.append({name: gradient.clone() for name, gradient in layers.items()})
