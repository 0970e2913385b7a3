"""Every moment of a process belongs to one phase."""

import threading

import pytest

from splitveil.common.run.progress import Phase, Phases


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def seconds_of(phases: Phases) -> dict[Phase, float]:
    return {phase: seconds for phase, seconds in phases.seconds().items() if seconds}


def test_a_phase_within_another_interrupts_it(clock: Clock) -> None:
    phases = Phases(clock)
    clock.now += 1
    with phases(Phase.ANSWER):
        clock.now += 2
        assert seconds_of(phases) == {Phase.OTHER: 1, Phase.ANSWER: 2}  # up to now
        with phases(Phase.DEFENSE):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert seconds_of(phases) == {Phase.OTHER: 17, Phase.ANSWER: 10, Phase.DEFENSE: 4}


def test_an_error_ends_a_phase(clock: Clock) -> None:
    phases = Phases(clock)

    def fail() -> None:
        with phases(Phase.FORWARD):
            clock.now += 1
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    clock.now += 2
    assert seconds_of(phases) == {Phase.FORWARD: 1, Phase.OTHER: 2}


def test_phases_of_two_threads_may_end_in_any_order(clock: Clock) -> None:
    """As two alignments do: the newest counts, and what is left goes on."""
    phases = Phases(clock)
    first, second = phases(Phase.ALIGNMENT), phases(Phase.ANSWER)
    first.__enter__()
    clock.now += 1
    second.__enter__()
    clock.now += 2
    first.__exit__(None, None, None)
    clock.now += 4
    second.__exit__(None, None, None)
    clock.now += 8
    assert seconds_of(phases) == {Phase.ALIGNMENT: 1, Phase.ANSWER: 6, Phase.OTHER: 8}


def test_the_seconds_of_all_phases_add_up_whatever_threads_do(clock: Clock) -> None:
    phases = Phases(clock)

    def work(phase: Phase) -> None:
        for _ in range(200):
            with phases(phase):
                clock.now += 0.25
            clock.now += 0.5

    threads = [threading.Thread(target=work, args=(one,)) for one in (Phase.WAIT, Phase.RECORD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(phases.seconds().values()) == clock.now - 100
