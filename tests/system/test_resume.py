"""Parties that were killed or stopped and started again with the same commands: exact resume."""

import signal
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from splitveil.active_party.ledger.account_book import LEDGER
from tests.support import certificates
from tests.support.processes import Pair, PartyName, side_by_side
from tests.support.restarted import (
    Outcome,
    Settings,
    assert_same,
    kept_up,
    killed_and_resumed,
    outcome,
    run_once,
    wait_for_line,
)
from tests.support.runs import write_example

SHORT = Settings(
    both=(
        "contract.epochs=6",
        "contract.batch_size=32",
        "contract.checkpoints.every_steps=4",
        "reconnect={max_s: 300, first_wait_s: 0.1, longest_wait_s: 0.5}",
    ),
)
"""A run of some seconds, with a checkpoint every few steps."""


class Case(NamedTuple):
    """A run, and which of its parties are killed when."""

    defense: str
    more: tuple[str, ...]
    struck: tuple[tuple[PartyName, ...], ...]
    has_tls: bool = False

    @property
    def settings(self) -> Settings:
        defense = f"defense={{name: {self.defense}}}"
        return Settings((*SHORT.both, *self.more), active=(defense,))


CASES = {
    "none": Case("none", (), (("active", "passive"), ("passive",))),
    "max_norm": Case(
        "max_norm, insecure_noise_seed: 7", (), (("passive",), ("active",)), has_tls=True
    ),
    "marvell": Case("marvell, insecure_noise_seed: 7", (), (("active",), ("active", "passive"))),
    "activations ahead": Case(
        "marvell, insecure_noise_seed: 7",
        ("contract.pipeline_depth=4",),
        (("passive",), ("active",), ("passive",)),
    ),
}
"""Persistent noise has its own in tests/journeys/test_killed.py, projected labels in
test_projected_labels.py."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return the results of each run undisturbed."""
    runs = (
        partial(run_once, tmp_path_factory.mktemp("whole"), case.settings)
        for case in CASES.values()
    )
    return dict(zip(CASES, side_by_side(*runs), strict=True))


def test_the_comparison_would_notice_another_run(whole: dict[str, Outcome]) -> None:
    for name, other in pairwise(CASES):
        with pytest.raises(AssertionError):
            assert_same(whole[name], whole[other])


def test_killed_at_random_steps_every_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, whole: dict[str, Outcome]
) -> None:
    trusted = certificates.make(tmp_path / "certificates")

    def run(name: str, case: Case) -> None:
        folder = tmp_path / name.replace(" ", "-")
        write_example(folder)
        if case.has_tls:
            certificates.use(trusted, folder)
        killed_and_resumed(folder, case.settings, whole[name], case.struck)

    side_by_side(*(partial(run, name, case) for name, case in CASES.items()))


def interrupted(both: Pair, whole: Outcome) -> None:
    """Ctrl-C at a terminal reaches both.

    A ledger lies there while nothing more is told: not while a run goes on, which may be killed.
    """
    both.start()
    ledger = both.active.folder / "checkpoint" / LEDGER
    wait_for_line(both, len(whole.metrics["active"]) // 3)
    for party in both:
        party.signal(signal.SIGINT)
    assert both.wait() == (130, 130), both.outputs
    assert ledger.is_file()
    both.start()
    wait_for_line(both, len(whole.metrics["active"]) // 2)
    assert not ledger.exists()
    assert both.wait() == (0, 0), both.outputs
    assert ledger.is_file()
    assert all("resuming in epoch" in party.said for party in both)


def given_up(lost: Literal["active", "passive"], both: Pair, whole: Outcome) -> None:
    """Past ``reconnect.max_s`` without its peer, a party saves where it is, and says so."""
    both.start(fast_clock=True)
    wait_for_line(both, len(whole.metrics["active"]) // 3)
    gone, left = both
    if lost == "passive":
        gone, left = left, gone
    gone.kill()
    left.hurry()
    assert left.wait() == 4, both.outputs
    assert "for 300 s" in left.said
    both.start()
    assert both.wait() == (0, 0), both.outputs
    assert all("resuming in epoch" in party.said for party in both)


def started_over_by_option(both: Pair, whole: Outcome) -> None:
    both.start()
    wait_for_line(both, len(whole.metrics["active"]) // 3)
    for party in both:
        party.kill()
    both.start(options=["--fresh"])
    assert both.wait() == (0, 0), both.outputs
    for party in both:
        assert party.folder.with_name(f"{party.party}.previous-1").is_dir()
        assert "going on" not in party.said
    assert "these labels were released at a leak AUC of" in both.active.said
    assert (both.active.folder.with_name("active.previous-1") / "checkpoint" / LEDGER).is_file()


def other_settings(both: Pair, whole: Outcome) -> None:
    """They are refused, whether the run is unfinished or finished, and nothing is moved."""

    def refused(*overrides: str) -> tuple[str, ...]:
        both.start(*overrides)
        assert both.wait() == (2, 2), both.outputs
        assert not list(both.active.folder.parent.glob("*.previous-*"))
        return tuple(party.said for party in both)

    both.start()
    wait_for_line(both, len(whole.metrics["active"]) // 3)
    for party in both:
        party.kill()
    for said in refused("contract.batch_size=16", "model_seed=3", "insecure_nonce_seed=99"):
        assert "an unfinished run with other settings: contract.batch_size: 16 now, 32 then" in said
        assert "model_seed: 3 now, 0 then" in said
        assert "insecure_nonce_seed" in said
        assert "99" not in said
    kept = [(party.folder / "settings.yaml").read_bytes() for party in both]
    for party in both:
        (party.folder / "settings.yaml").write_text("contract: [")
    assert all("settings.yaml: not valid YAML" in said for said in refused())
    for party, content in zip(both, kept, strict=True):
        (party.folder / "settings.yaml").write_bytes(content)
    both.start()
    assert both.wait() == (0, 0), both.outputs
    assert all("resuming in epoch" in party.said for party in both)
    assert all(
        "has a finished run with other settings: model_seed" in said
        for said in refused("model_seed=3")
    )


def finished(both: Pair, whole: Outcome) -> None:
    """The same commands train nothing once more, as where a unit starts at each boot."""
    both.start()
    assert both.wait() == (0, 0), both.outputs
    files = {path: path.stat().st_mtime_ns for path in both.active.folder.parent.rglob("*")}
    both.start("torch_threads=2")
    assert both.wait() == (0, 0), both.outputs
    assert all("this run has finished, and nothing is trained" in party.said for party in both)
    assert {path: path.stat().st_mtime_ns for path in both.active.folder.parent.rglob("*")} == files


def refused_twice(both: Pair, whole: Outcome) -> None:
    """A second process of the same run goes without, and does the first one no harm."""
    both.start()
    wait_for_line(both, 5)
    for party in both:
        party.signal(signal.SIGSTOP)  # so that it is there for as long as the others need
    folder = both.active.folder.parents[2]
    with kept_up(folder, SHORT, log="second") as others:
        others.start()
        assert others.wait() == (2, 2), others.outputs
        assert all("another process" in other.said for other in others)
    for party in both:
        party.signal(signal.SIGCONT)
    assert both.wait() == (0, 0), both.outputs


Story = Callable[[Pair, Outcome], None]


def test_a_run_that_was_ended_early_can_be_resumed_or_started_over(
    tmp_path: Path, whole: dict[str, Outcome]
) -> None:
    stories: dict[str, Story] = {
        "interrupted": interrupted,
        "active-lost": partial(given_up, "active"),
        "passive-lost": partial(given_up, "passive"),
        "fresh": started_over_by_option,
        "changed": other_settings,
        "finished": finished,
        "twice": refused_twice,
    }

    def tell(name: str, story: Story) -> None:
        folder = tmp_path / name
        write_example(folder)
        with kept_up(folder, CASES["none"].settings) as both:
            story(both, whole["none"])
            assert_same(outcome(folder / "runs"), whole["none"], both.outputs)

    side_by_side(*(partial(tell, name, story) for name, story in stories.items()))
