"""The passive party's server for predictions: damaged and too many calls, silence, its end."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitveil.active_party.predict.embed_client import EmbedClient
from splitveil.common.errors import PeerLeft, PeerUnreachable, SettingsError
from splitveil.common.party.credentials import credential_files
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import method_path
from splitveil.common.wire.inference_codec import encode_describe, encode_ids, model_digest
from splitveil.common.wire.limits import INFERENCE_SERVICE
from splitveil.passive_party.predict import service as service_module
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.passive_party.predict.service import InferenceServer, InferenceService, Throttle
from splitveil.protos import split_learning_pb2 as pb
from tests.support.inference import IN_TIME_S, Trained, free_port, serving_passive
from tests.support.mutations import Mutator
from tests.support.runs import CPU
from tests.support.waiting import wait_until

MUTANTS = 400


def identity(small: Trained) -> ModelIdentity:
    return ServedModel.load(small.passive("passive"), CPU).identity


@contextmanager
def calling(small: Trained, port: int, deadline_s: float = IN_TIME_S) -> Iterator[EmbedClient]:
    settings = small.active()
    shown = credential_files(settings, "active")
    where = f"127.0.0.1:{port}"
    connection = PeerConnection(where, settings.contract, shown, party="passive")
    with EmbedClient(connection, identity(small), deadline_s) as client:
        yield client


def code_of(
    channel: grpc.Channel, path: str, message: bytes, *, is_stream: bool
) -> grpc.StatusCode | None:
    """Send one message, and return the status of a refusal; None if it was answered."""
    # grpcio's stubs do not know of calls without serialisers.
    stream: Any = channel.stream_stream(path)
    single: Any = channel.unary_unary(path)
    try:
        if is_stream:
            list(stream(iter([message]), timeout=IN_TIME_S))
        else:
            single(message, timeout=IN_TIME_S)
    except grpc.RpcError as error:
        return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    return None


def test_damaged_messages_are_refused_and_the_next_client_is_answered(small: Trained) -> None:
    port, contract, ids = free_port(), small.active().contract, small.test_ids[:3]
    model = model_digest(identity(small))
    whole = {
        "Describe": encode_describe("passive", contract),
        "Embed": encode_ids(0, ids, model),
        "EmbedTable": pb.TableRequest(model_digest=model, points=bytes(32), last=True),
    }
    mutator = Mutator({name: [sent.SerializeToString()] for name, sent in whole.items()}, seed=5)
    allowed = {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
    own = small.passive("passive", "answers.whole_table=true")
    with serving_passive(own, port) as service, calling(small, port) as client:
        client.check_model()
        channel = client.connection.channel()
        refused = 0
        for _ in range(3 * MUTANTS):
            mutant = mutator.draw()
            path = method_path(mutant.method, INFERENCE_SERVICE)
            code = code_of(channel, path, mutant.data, is_stream=mutant.method != "Describe")
            assert code in {None, *allowed}, mutant
            refused += code is not None
        assert refused > MUTANTS
        assert sum(service.refused.values()) == refused
        assert client.submit(ids).result().known.all()


def test_one_call_too_many_is_turned_away_and_others_go_on(
    small: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "MAX_STREAMS", 2)
    port, ids = free_port(), small.test_ids[:2]
    with (
        serving_passive(small.passive("passive"), port),
        calling(small, port) as first,
        calling(small, port) as second,
        calling(small, port) as third,
    ):
        assert first.submit(ids).result().known.all()
        assert second.submit(ids).result().known.all()
        with pytest.raises(PeerUnreachable, match="as many calls as it accepts"):
            third.submit(ids).result()
        assert first.submit(ids).result().known.all()
        second.close()

        def is_answered() -> bool:
            try:
                return bool(third.submit(ids).result().known.all())
            except PeerUnreachable:
                return False

        wait_until(is_answered)


def test_a_silent_server_is_given_up_after_the_deadline(
    small: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    embed = ServedModel.embed

    def stuck(self: ServedModel, ids: Any) -> Embedded:
        released.wait(IN_TIME_S)
        return embed(self, ids)

    port, ids = free_port(), small.test_ids[:2]
    with serving_passive(small.passive("passive"), port), calling(small, port, 0.2) as client:
        client.check_model()
        monkeypatch.setattr(ServedModel, "embed", stuck)
        with pytest.raises(PeerUnreachable, match=r"not answered within 0\.2 s"):
            client.submit(ids).result()
        released.set()


def test_all_questions_under_way_fail_at_once_when_the_server_is_gone(small: Trained) -> None:
    port, ids = free_port(), small.test_ids[:2]
    slow = Throttle(0.001)
    with calling(small, port) as client:
        with serving_passive(small.passive("passive"), port, throttle=slow):
            waiting: list[Future[Embedded]] = [client.submit(ids) for _ in range(5)]
            assert not any(answer.done() for answer in waiting)
        for answer in waiting:  # the server may have the time to say that it leaves, or not
            assert isinstance(answer.exception(IN_TIME_S), PeerUnreachable | PeerLeft)
        assert isinstance(client.submit(ids).exception(IN_TIME_S), PeerUnreachable)
        with serving_passive(small.passive("passive"), port):  # back, and used without a new client

            def is_back() -> bool:
                return client.submit(ids).exception(IN_TIME_S) is None

            wait_until(is_back)


def test_a_server_that_stops_answers_what_it_has_begun(
    small: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()
    embed = ServedModel.embed

    def held(self: ServedModel, ids: Any) -> Embedded:
        begun.set()
        released.wait(IN_TIME_S)
        return embed(self, ids)

    port, ids = free_port(), small.test_ids[:2]
    own = small.passive("passive")
    service = InferenceService(ServedModel.load(own, CPU), "passive", own.contract, Throttle(None))
    credentials = credential_files(own, "passive")
    server = InferenceServer(service, own.contract, f"127.0.0.1:{port}", credentials)
    with calling(small, port) as busy, calling(small, port) as idle:
        assert idle.submit(ids).result().known.all()
        monkeypatch.setattr(ServedModel, "embed", held)
        answer = busy.submit(ids)
        assert begun.wait(IN_TIME_S)
        stopping = threading.Thread(target=server.stop, args=(IN_TIME_S,))
        stopping.start()
        wait_until(lambda: service._stopping)
        released.set()
        assert answer.result(IN_TIME_S).known.all()
        stopping.join(IN_TIME_S)
        assert not stopping.is_alive()


def test_health_is_served_beside_it(small: Trained) -> None:
    port = free_port()
    with serving_passive(small.passive("passive"), port), calling(small, port) as client:
        client.check_model()
        stub = health_pb2_grpc.HealthStub(client.connection.channel())
        request = health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
        reply = stub.Check(request, timeout=IN_TIME_S)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_taken_address_is_a_settings_error(small: Trained) -> None:
    port, own = free_port(), small.passive("passive")
    with serving_passive(own, port), pytest.raises(SettingsError, match="cannot serve at"):
        serving_passive(own, port).__enter__()
