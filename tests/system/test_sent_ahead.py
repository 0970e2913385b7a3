"""A passive party that sends a whole epoch ahead of the agreed pipeline depth and reads nothing."""

import time
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from splitveil.common.run.course import Batch, run_course
from splitveil.common.run.messages import Activation, Answer, LeaveReason
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.tensor_codec import (
    Frame,
    TensorAssembler,
    TensorLimits,
    encode_activation,
)
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.protos import split_learning_pb2 as pb
from tests.support.peers import Lost
from tests.support.runs import build_parties, write_example
from tests.system.test_floods import FLOOD_S, MOST_GROWTH_MIB, served

# A megabyte a question, and more than 200 questions an epoch.
VALUES = 262_144
OVERRIDES = [
    f"contract.cut_shape=[{VALUES}]",
    "contract.batch_size=1",
    "contract.evaluation_batch_size=1",
    "contract.wire={unchunked_bytes: 1000, chunk_bytes: 524288}",
]
READ_FIRST = 8
"""Answers that are read before memory is measured: the first ones fill what is filled once."""


class Leaves(GrpcPeer):
    """Is gone at its first question, without a goodbye."""

    def send_activation(self, activation: Activation) -> None:
        raise Lost

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        """Say nothing."""


class Ahead:
    """Questions on one stream, written as fast as the line takes them."""

    def __init__(self, channel: grpc.Channel, method: str, run_id: str, limits: TensorLimits):
        self.sent = 0
        self._stub: Any = channel.stream_stream(method_path(method))
        self._run_id = run_id
        self._limits = limits

    def ask(self, batches: Iterable[Batch]) -> Iterator[bytes]:
        replies: Iterator[bytes] = self._stub(self._questions(batches))
        return replies

    def _questions(self, batches: Iterable[Batch]) -> Iterator[bytes]:
        for batch in batches:
            values = torch.full((len(batch.positions), VALUES), 1e-3 * (batch.step % 7))
            identity = batch.identity(self._run_id)
            for frame in encode_activation(Activation(identity, values), self._limits):
                yield frame.data
            self.sent += 1


def answers_in(frames: Iterator[bytes], limits: TensorLimits) -> Iterator[Answer]:
    assembler = TensorAssembler.of_answers(limits)
    for frame in frames:
        answer = assembler.add(Frame(frame))
        if answer is not None:
            yield answer
            assembler = TensorAssembler.of_answers(limits)


def test_what_is_sent_beyond_the_depth_waits_on_the_line_and_is_answered_in_its_turn(
    tmp_path: Path,
) -> None:
    """Whoever ignores the depth has an order of answers it could have had; no more is stored."""
    write_example(tmp_path)
    both = [*OVERRIDES, "contract.pipeline_depth=4"]
    parties = build_parties(tmp_path, both, both)
    contract, reconnect = parties.run.contract, parties.passive_settings.reconnect
    limits = TensorLimits.of(contract)
    with served(tmp_path, *both, "leak_monitor.queue_batches=2") as active:
        where = f"127.0.0.1:{active.port}"
        with Leaves(PeerConnection(where, contract), reconnect) as peer, pytest.raises(Lost):
            parties.run.run(peer)
        rows, run_id = parties.passive.rows, parties.run.run_id
        assert rows is not None
        epoch = [batch for batch in run_course(contract, rows) if batch.epoch == 0]
        training = list(takewhile(lambda batch: batch.split == "train", epoch))
        held_out = epoch[len(training) :]
        beyond = next(batch for batch in run_course(contract, rows) if batch.epoch == 1)
        assert len(training) > 2 * MOST_GROWTH_MIB
        with grpc.insecure_channel(where) as channel:
            ahead = Ahead(channel, "Train", run_id, limits)
            answers = answers_in(ahead.ask([*training, beyond]), limits)
            identities = [next(answers).batch for _ in range(READ_FIRST)]
            base = active.mib("VmRSS")
            active.forget_peak()
            time.sleep(FLOOD_S)  # the flood goes on, and nobody reads
            assert active.mib("VmHWM") - base < MOST_GROWTH_MIB
            assert ahead.sent < len(training) / 2  # the peer's memory is not where they wait
            with pytest.raises(grpc.RpcError) as caught:
                identities.extend(answer.batch for answer in answers)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert active.mib("VmHWM") - base < MOST_GROWTH_MIB
            # The held-out rows are due, and the run goes on.
            replies = Ahead(channel, "Evaluate", run_id, limits).ask(held_out[:3])
            scored = [pb.EvaluateReply.FromString(reply).step for reply in replies]
        assert scored == [0, 1, 2]
        log = active.log.read_text()
    assert "fault in a handler" not in log
    # extend() stops at the error, and keeps what it was given before.
    assert identities == [batch.identity(run_id) for batch in training]
