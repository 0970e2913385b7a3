"""Online predictions while the line to a passive party is dead, and nobody hangs up."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.support import inference
from tests.support.endpoints import value_of
from tests.support.inference import Trained, answering, free_port
from tests.support.proxies import SilentLine
from tests.support.waiting import wait_until
from tests.system.test_predict import expected


@pytest.mark.parametrize("fallback", [False, True])
def test_a_line_that_goes_dead_costs_503_or_the_fallback_and_no_restart(
    small: Trained, fallback: bool
) -> None:
    """How soon is measured by hand, on two hosts: docs/guide/predicting.md has the figures."""
    port, ids = free_port(), small.test_ids[:3]
    own = ("serving.timeout_s=1", f"serving.fallback={str(fallback).lower()}")
    with (
        inference.serving_passive(small.passive("passive"), port),
        SilentLine(port) as line,
        answering(small, *own, ports={"passive": line.port}) as program,
        ThreadPoolExecutor(8) as pool,
    ):
        wait_until(lambda: program.service.trouble is None)
        assert program.ask(ids).body["model"] == 3 * ["joint"]
        for _ in range(2):  # the second time over connections that the first one has left
            line.silence()
            first = list(pool.map(lambda _: program.ask(ids), range(8)))
            # Some time after, requests are not even tried.
            wait_until(lambda: program.service.trouble is not None)
            later = program.ask(ids)
            line.resume()
            wait_until(lambda: program.service.trouble is None)
            back = program.ask(ids)
            for answer in (*first, later):
                assert answer.status == (200 if fallback else 503)
                if fallback:
                    assert answer.body["model"] == 3 * ["fallback"]
                    assert answer.body["why_fallback"]
            np.testing.assert_array_equal(back.probabilities, expected(small)[:3])
    assert value_of(program.status, "splitveil_predict_timeouts_total") >= 1
    assert value_of(program.status, "splitveil_reconnects_total", peer="passive") == 2
