"""Predictions from whole tables: the same bits, and a passive party that is told no id."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from splitveil.active_party.predict.embed_client import TableClient
from splitveil.common.alignment import ristretto
from splitveil.common.errors import InvalidMessage, ProtocolError
from splitveil.common.run.contract import Contract
from splitveil.common.wire import inference_codec
from splitveil.common.wire.tensor_codec import TensorLimits
from splitveil.passive_party.predict.service import InferenceService
from splitveil.protos import split_learning_pb2 as pb
from tests.support.inference import Trained, predicting

GIVEN = ("answers.whole_table=true",)


@pytest.fixture(scope="module")
def trained(once: Callable[[str], Trained]) -> Trained:
    return once("three_parties concat")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    received: list[bytes] = []
    for name in ("embed", "embed_table"):
        answer = getattr(InferenceService, name)

        def listening(self: Any, requests: Any, context: Any, answer: Any = answer) -> Any:
            def noting() -> Iterator[Any]:
                for request in requests:
                    received.append(request.SerializeToString())
                    yield request

            return answer(self, noting(), context)

        monkeypatch.setattr(InferenceService, name, listening)
    return received


def test_the_whole_table_gives_the_same_bits_and_names_no_id(
    trained: Trained, heard: list[bytes]
) -> None:
    ids = [*trained.test_ids, "nobody", trained.test_ids[0]]
    with predicting(trained) as predictor:
        named = [predictor.predict(ids[at : at + 50]) for at in range(0, len(ids), 50)]
    assert any(trained.test_ids[0].encode() in message for message in heard)
    heard.clear()
    with predicting(trained, passive=GIVEN, whole_table=True) as predictor:
        predictor.take_tables(ids)
        sealed = [predictor.predict(ids[at : at + 50]) for at in range(0, len(ids), 50)]
    for one, other in zip(named, sealed, strict=True):
        np.testing.assert_array_equal(one.probabilities, other.probabilities)
        np.testing.assert_array_equal(one.found, other.found)
        assert one.missing_at == other.missing_at
    everything = b"".join(heard)
    assert not any(name.encode() in everything for name in trained.test_ids)
    # Nor what anybody can compute of an id: a masked point is another one each time.
    group = ristretto.load()
    points = group.hash_to_group(ristretto.digest_ids(trained.test_ids))
    assert not any(points[at : at + 32] in everything for at in range(0, len(points), 32))
    assert len(everything) < (len(ids) * 32 + 1024) * len(trained.settings.passive)


def test_masks_are_fresh_every_time(trained: Trained, heard: list[bytes]) -> None:
    with predicting(trained, passive=GIVEN, whole_table=True) as predictor:
        for _ in range(2):
            predictor.take_tables(trained.test_ids[:5])
    assert len(set(heard)) == len(heard) == 2 * len(trained.settings.passive)


def test_only_allowed_rows_are_in_the_table(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "allowed.txt").write_text("\n".join(trained.test_ids[:4]) + "\n")
    passive, ids = [*GIVEN, f"answers.allowed_ids={tmp_path}/allowed.txt"], trained.test_ids[:10]
    with predicting(trained, passive=passive, whole_table=True) as predictor:
        predictor.take_tables(ids)
        np.testing.assert_array_equal(predictor.predict(ids).found, [True] * 4 + [False] * 6)


def test_only_rows_whose_ids_were_asked_for_can_be_opened(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is sent; without the point of its id, none of the keys fits."""
    sent: list[bytes] = []
    keys: list[bytes] = []
    opened = TableClient._rows_in

    def keeping(self: TableClient, stream: Any, key_of: Any) -> Any:
        receive = stream.receive

        def noting() -> Any:
            reply = receive()
            sent.extend(sealed for _, sealed in inference_codec.sealed_rows(reply, self._limits))
            return reply

        stream.receive = noting
        keys.extend(key for _, key in key_of.values())
        return opened(self, stream, key_of)

    monkeypatch.setattr(TableClient, "_rows_in", keeping)
    asked = trained.test_ids[:3]
    with predicting(trained, passive=GIVEN, whole_table=True) as predictor:
        predictor.take_tables(asked)
        assert predictor.predict(asked).found.all()
        assert not predictor.predict(trained.test_ids[3:5]).found.any()
    assert len(sent) > 300
    fitting = 0
    for sealed, key in itertools.product(sent, keys):
        with suppress(InvalidMessage):
            inference_codec.open_row(sealed, key)
            fitting += 1
    assert fitting == 3 * len(trained.settings.passive)


# ---- messages ----

CONTRACT = Contract(run_name="small", cut_shape=(2, 3), batch_size=8, epochs=1)
LIMITS = TensorLimits.of(CONTRACT)
POINTS = ristretto.load().hash_to_group(ristretto.digest_ids(["a", "b"]))
SECRETS = list(inference_codec.secrets_of(POINTS))
VALUES = torch.arange(12.0).view(2, 2, 3)


def test_sealed_rows_open_with_their_own_key_alone_and_hold_numbers() -> None:
    rows = list(inference_codec.sealed_rows(inference_codec.seal(SECRETS, VALUES, LIMITS), LIMITS))
    for (tag, sealed), secret, values in zip(rows, SECRETS, VALUES, strict=True):
        assert tag == secret.tag
        assert torch.equal(
            inference_codec.decode_rows([inference_codec.open_row(sealed, secret.key)], LIMITS)[0],
            values,
        )
    sealed = rows[0][1]
    damaged = bytes([sealed[0] ^ 1]) + sealed[1:]
    for wrong, secret in ((sealed, SECRETS[1]), (damaged, SECRETS[0])):
        with pytest.raises(InvalidMessage, match="another key"):
            inference_codec.open_row(wrong, secret.key)
    ((_, sealed), _) = inference_codec.sealed_rows(
        inference_codec.seal(SECRETS, VALUES / 0, LIMITS), LIMITS
    )
    with pytest.raises(InvalidMessage, match="finite"):
        inference_codec.decode_rows([inference_codec.open_row(sealed, SECRETS[0].key)], LIMITS)


@pytest.mark.parametrize(
    "reply",
    [
        pb.TableReply(tags=bytes(15), sealed=bytes(40)),
        pb.TableReply(tags=bytes(16), sealed=bytes(39)),
        pb.TableReply(tags=bytes(32), sealed=bytes(40)),
        pb.TableReply(sealed=b"x"),
    ],
)
def test_rows_of_wrong_lengths_are_refused(reply: pb.TableReply) -> None:
    with pytest.raises(InvalidMessage, match="do not belong"):
        list(inference_codec.sealed_rows(reply, LIMITS))


def test_points_are_counted() -> None:
    assert inference_codec.decode_points(POINTS, 2) == POINTS
    for points, expected in ((POINTS[:-1], None), (b"", None), (POINTS, 3)):
        with pytest.raises(InvalidMessage):
            inference_codec.decode_points(points, expected)


def test_a_point_outside_the_group_is_refused(trained: Trained) -> None:
    with predicting(trained, passive=GIVEN, whole_table=True) as predictor:
        client = predictor.clients[0]
        assert isinstance(client, TableClient)
        for wrong in (bytes(32), b"\xff" * 32):
            stream = client.open_table(lambda: None)
            request = pb.TableRequest(model_digest=client._digest, points=wrong, last=True)
            stream.send_all([request])
            with pytest.raises(ProtocolError, match="invalid"):
                stream.receive()
            stream.drop()


def test_multiplications_are_undone_by_the_inverse() -> None:
    group = ristretto.load()
    scalar = group.random_scalar()
    assert group.multiply(group.multiply(POINTS, scalar), group.invert(scalar)) == POINTS
    with pytest.raises(ValueError, match="inverse"):
        group.invert(bytes(32))


def test_a_reply_with_as_many_rows_as_allowed_fits_into_a_message() -> None:
    wide = CONTRACT.model_copy(update={"cut_shape": (1000,)})
    rows = inference_codec.rows_of_a_reply(wide)
    secrets = [inference_codec.Secret(bytes(16), bytes(32))] * rows
    reply = inference_codec.seal(secrets, torch.zeros(rows, 1000), TensorLimits.of(wide))
    assert reply.ByteSize() <= wide.max_message_bytes
