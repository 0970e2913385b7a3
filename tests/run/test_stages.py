"""The state machine of a run: its table is its drawing, and nothing else is taken."""

import os
import re
import threading

import pytest

from splitveil.active_party.run import lifecycle
from splitveil.active_party.run.lifecycle import TRANSITIONS, RunStages, Stage
from splitveil.active_party.run.parties import PassivePeers
from splitveil.common.run.contract import Contract
from tests.support.waiting import HANGS_AFTER_S

CONTRACT = Contract(run_name="a", cut_shape=(4,), batch_size=4, epochs=1)


def test_the_drawing_is_the_table() -> None:
    lines = re.findall(r"^    (\w+) +-> (.+)$", lifecycle.__doc__ or "", flags=re.MULTILINE)
    drawn = {Stage[one.upper()]: {Stage[name.upper()] for name in to.split()} for one, to in lines}
    assert drawn | {Stage.ENDED: set()} == TRANSITIONS


def test_every_stage_is_reached_and_only_an_early_end_is_final() -> None:
    reached = {stage for following in TRANSITIONS.values() for stage in following}
    assert reached | {Stage.WAITING} == set(Stage)
    assert [stage for stage in Stage if not TRANSITIONS[stage]] == [Stage.ENDED]


@pytest.mark.parametrize("start", Stage)
def test_a_transition_beyond_the_table_is_refused(start: Stage) -> None:
    for wanted in Stage:
        machine = at(start)
        if wanted in TRANSITIONS[start]:
            machine.move_to(wanted)
            assert machine.current is wanted
        else:
            with pytest.raises(RuntimeError, match=start.name):
                machine.move_to(wanted)
            assert machine.current is start


def test_progress_within_a_stage_wakes_no_one_who_waits_for_its_end() -> None:
    """A thread that woke at every answer would delay it."""
    machine, looked, looks = at(Stage.TRAINING), threading.Event(), list[Stage]()

    def is_over() -> bool:
        looks.append(machine.current)
        looked.set()
        return machine.current.is_over

    waiting = threading.Thread(target=machine.wait, args=(is_over, HANGS_AFTER_S))
    waiting.start()
    assert looked.wait(HANGS_AFTER_S)
    for _ in range(1000):
        with machine:
            machine.note_progress()
        os.sched_yield()
    machine.move_to(Stage.ENDED)
    waiting.join(HANGS_AFTER_S)
    assert looks == [Stage.TRAINING, Stage.ENDED]


def at(stage: Stage) -> RunStages:
    ways: dict[Stage, list[Stage]] = {Stage.WAITING: []}
    while stage not in ways:
        for known, way in list(ways.items()):
            for following in TRANSITIONS[known]:
                ways.setdefault(following, [*way, following])
    machine = RunStages(PassivePeers(CONTRACT))
    for each in ways[stage]:
        machine.move_to(each)
    return machine
