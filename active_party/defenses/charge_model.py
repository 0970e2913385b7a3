"""What a defense's answers are charged, as far as its settings say it before any training."""

from typing import Literal, NamedTuple, Self

from splitveil.common.privacy.charge import UNBOUNDED, Adversary, Charge


class ChargeModel(NamedTuple):
    """The charge of some answers of a run, as precisely as it is known before the run.

    The defense, the epochs and the labels are known then; the gradients are not. So the divergence
    is one of four kinds:

        exact       ``charge``, as only the strength decides: persistent noise, noisy labels or
                    sums, no credit at all
        bound       ``charge`` at most; proved where it is computed
        estimate    from ``low`` to ``charge`` for batches that are as the estimate assumes. Others
                    are charged more, up to infinity, and so may the run be
        unknown     only the gradients decide
    """

    low: float  # the lowest divergence
    charge: Charge  # with the highest divergence, and all its other figures
    certainty: Literal["exact", "bound", "estimate", "unknown"]
    said: str  # a sentence about how reliable it is
    noise: Literal["fresh", "persistent"] = "fresh"  # one charge of persistent noise covers a run
    refusal: str | None = None  # why the first answer exceeds every budget; None if it need not
    answers: int = 1

    @classmethod
    def exact(
        cls,
        charge: Charge,
        said: str,
        noise: Literal["fresh", "persistent"] = "fresh",
        refusal: str | None = None,
    ) -> Self:
        """Return a charge that the settings determine."""
        return cls(charge.sum_kl, charge, "exact", said, noise, refusal)

    @classmethod
    def of_gradients(cls, name: str) -> Self:
        """Return the charge of a defense, by name, before there is a gradient."""
        said = (
            f"The charge of {name} depends on the gradients alone: nothing can be said "
            "before the run. Its ledger says it after each epoch."
        )
        return cls(0.0, UNBOUNDED, "unknown", said)

    @property
    def high(self) -> float:
        return self.charge.sum_kl

    @property
    def is_promise(self) -> bool:
        """True if a run is never charged more than ``high``."""
        return self.certainty in ("exact", "bound")

    def over(self, answers: int) -> Self:
        """Return what several answers are charged together, where this is the charge of one."""
        if self.noise == "persistent" or answers == 1:
            return self._replace(answers=answers)
        one = self.charge
        whole = Charge(self.high * answers, adversary=one.adversary, is_gaussian=one.is_gaussian)
        return self._replace(low=self.low * answers, charge=whole, answers=answers)

    def narrowed(self, peers: Adversary) -> Self:
        """Return the same for no more peers than these."""
        return self._replace(charge=self.charge.narrowed(peers))
