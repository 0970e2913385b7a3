"""Parties that were killed or stopped and started again with the same commands: exact resume."""

import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from splitveil.active_party.ledger.account_book import LEDGER
from tests import certificates
from tests.runs import write_example
from tests.system.processes import side_by_side
from tests.system.restarted import (
    Both,
    Outcome,
    Settings,
    assert_same,
    kept_up,
    outcome,
    run_here,
)

DEFENSES = {
    "none": "{name: none}",
    "max_norm": "{name: max_norm, insecure_noise_seed: 7}",
    "marvell, fresh noise": "{name: marvell, noise: fresh, insecure_noise_seed: 7}",
    "marvell, persistent noise": "{name: marvell, noise: persistent, insecure_noise_seed: 7}",
}


def settings(defense: str = "{name: none}") -> Settings:
    """Return a run of some seconds, with a checkpoint every few steps."""
    return Settings(
        both=(
            "contract.epochs=6",
            "contract.batch_size=32",
            "contract.checkpoints.every_steps=4",
            "reconnect={max_s: 300, first_wait_s: 0.1, longest_wait_s: 0.5}",
        ),
        active=(f"defense={defense}",),
    )


@pytest.fixture(scope="module")
def whole(example: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return the results of an undisturbed run with each defense."""
    return {
        name: run_here(example, tmp_path_factory.mktemp("whole"), settings(defense))
        for name, defense in DEFENSES.items()
    }


def test_the_comparison_would_notice_another_run(whole: dict[str, Outcome]) -> None:
    for name, other in (("none", "max_norm"), ("max_norm", "marvell, fresh noise")):
        with pytest.raises(AssertionError):
            assert_same(whole[name], whole[other])


def wait_for_line(both: Both, line: int) -> None:
    """Wait until the active party has noted so much, and see to it that the run is not over."""
    both.wait_until(lambda: both.active.lines >= line)
    assert [party.exit_code for party in both] == [None, None], both.outputs


def test_killed_at_random_steps_every_defense_ends_as_if_nothing_had_happened(
    tmp_path: Path, whole: dict[str, Outcome]
) -> None:
    victims: dict[str, list[tuple[str, ...]]] = {
        "none": [("active", "passive"), ("passive",)],
        "max_norm": [("passive",), ("active",)],
        "marvell, fresh noise": [("active",), ("active", "passive")],
        "marvell, persistent noise": [("active", "passive"), ("active",)],
    }

    def run(name: str) -> None:
        folder = tmp_path / name.replace(", ", "-").replace(" ", "-")
        write_example(folder)
        if name == "max_norm":
            certificates.use(certificates.make(tmp_path / "certificates"), folder)
        generator, lines = random.Random(name), len(whole[name].metrics["active"])
        with kept_up(folder, settings(DEFENSES[name])) as both:
            both.start()
            for part, names in enumerate(victims[name]):
                wait_for_line(both, int(lines * (0.1 + 0.4 * part + 0.3 * generator.random())))
                struck = [party for party in both if party.party in names]
                for party in struck:
                    party.kill()
                for party in struck:
                    party.start()
            assert both.wait() == (0, 0), both.outputs
            for party in both:
                assert "resuming in epoch" in party.output
            assert_same(outcome(folder / "runs"), whole[name], both.outputs)
            assert not list(tmp_path.glob(f"{folder.name}/runs/small/*.previous-*"))

    side_by_side(*(partial(run, name) for name in DEFENSES))


def test_killed_at_random_steps_a_run_with_activations_ahead_ends_as_if_nothing_had_happened(
    example: Path, tmp_path: Path
) -> None:
    plain = settings("{name: marvell, insecure_noise_seed: 7}")

    def run(depth: int) -> None:
        ahead = plain._replace(both=(*plain.both, f"contract.pipeline_depth={depth}"))
        whole = run_here(example, tmp_path / f"whole-{depth}", ahead)
        folder = tmp_path / str(depth)
        write_example(folder)
        generator, lines = random.Random(depth), len(whole.metrics["active"])
        with kept_up(folder, ahead) as both:
            both.start()
            for part, struck in enumerate((both.passive, both.active, both.passive)):
                wait_for_line(both, int(lines * (0.1 + 0.25 * part + 0.2 * generator.random())))
                struck.kill()
                struck.start()
            assert both.wait() == (0, 0), both.outputs
            assert_same(outcome(folder / "runs"), whole, both.outputs)

    for depth in (2, 4):
        run(depth)


def interrupted(both: Both, whole: Outcome) -> None:
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


def given_up(lost: Literal["active", "passive"], both: Both, whole: Outcome) -> None:
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


def started_over_by_option(both: Both, whole: Outcome) -> None:
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


def other_settings(both: Both, whole: Outcome) -> None:
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


def finished(both: Both, whole: Outcome) -> None:
    """The same commands train nothing once more, as where a unit starts at each boot."""
    both.start()
    assert both.wait() == (0, 0), both.outputs
    files = {path: path.stat().st_mtime_ns for path in both.active.folder.parent.rglob("*")}
    both.start("torch_threads=2")
    assert both.wait() == (0, 0), both.outputs
    assert all("this run has finished, and nothing is trained" in party.said for party in both)
    assert {path: path.stat().st_mtime_ns for path in both.active.folder.parent.rglob("*")} == files


def refused_twice(both: Both, whole: Outcome) -> None:
    """A second process of the same run goes without, and does the first one no harm."""
    both.start()
    wait_for_line(both, 5)
    for party in both:
        party.signal(signal.SIGSTOP)  # so that it is there for as long as the others need
    folder = both.active.folder.parents[2]
    with kept_up(folder, settings(), log="second") as others:
        others.start()
        assert others.wait() == (2, 2), others.outputs
        assert all("another process" in other.said for other in others)
    for party in both:
        party.signal(signal.SIGCONT)
    assert both.wait() == (0, 0), both.outputs


Story = Callable[[Both, Outcome], None]


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
        with kept_up(folder, settings()) as both:
            story(both, whole["none"])
            assert_same(outcome(folder / "runs"), whole["none"], both.outputs)

    side_by_side(*(partial(tell, name, story) for name, story in stories.items()))
