"""Sums by oblivious transfer: exact for parties that follow the protocol, refused for others."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.common.alignment import ristretto
from splitveil.common.errors import InvalidMessage, OutOfStep, ProtocolError
from splitveil.common.oblivious_transfer import Receiver, Sender, base_transfers, extension

Bits = npt.NDArray[np.bool_]
Values = npt.NDArray[np.uint32]


def parties(width: int, targets: int = 1) -> tuple[Sender, Receiver]:
    sender = Sender(width, targets)
    receiver = Receiver(width, sender.request, targets)
    sender.accept(receiver.reply)
    return sender, receiver


def random_rows(
    rows: int, width: int, targets: int, rng: np.random.Generator
) -> tuple[Bits, Values]:
    return rng.random((rows, width)) < 0.5, rng.integers(0, 2**32, (rows, targets), np.uint32)


def true_sums(bits: Bits, values: Values) -> Values:
    sums: Values = (bits[:, :, None] * values[:, None, :]).sum(axis=0, dtype=np.uint32)
    return sums


@settings(deadline=None, max_examples=5)
@given(
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    width=st.integers(1, 40),
    targets=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_the_sums_are_exact(chunks: list[int], width: int, targets: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sender, receiver = parties(width, targets)
    rows = [random_rows(size, width, targets, rng) for size in chunks]
    messages = [receiver.extend(bits) for bits, _ in rows]  # ahead of all answers
    for message, (_, values) in zip(messages, rows, strict=True):
        receiver.take(sender.answer(message, values))
    bits, values = (np.concatenate(part) for part in zip(*rows, strict=True))
    assert np.array_equal(receiver.sums - sender.sums, true_sums(bits, values))


def test_a_chunk_of_many_blocks_and_one_of_a_single_choice_are_exact() -> None:
    rng = np.random.default_rng(0)
    sender, receiver = parties(97)
    expected = np.zeros((97, 1), np.uint32)
    for rows in (1000, 1):
        bits, values = random_rows(rows, 97, 1, rng)
        receiver.take(sender.answer(receiver.extend(bits), values))
        expected += true_sums(bits, values)
    assert np.array_equal(receiver.sums - sender.sums, expected)


def test_a_receiver_may_choose_one_row_for_all_sums_and_gets_its_value_once_in_each() -> None:
    sender, receiver = parties(5)
    bits = np.zeros((9, 5), np.bool_)
    bits[4] = True
    values = np.arange(100, 109, dtype=np.uint32)[:, None]
    receiver.take(sender.answer(receiver.extend(bits), values))
    assert (receiver.sums - sender.sums).tolist() == [[104]] * 5


def test_each_party_has_uniform_numbers_alone() -> None:
    """For bits and values that are zero, of which nothing else would hide the sums."""
    sender, receiver = parties(2000, 4)
    bits, values = np.zeros((1, 2000), np.bool_), np.zeros((1, 4), np.uint32)
    receiver.take(sender.answer(receiver.extend(bits), values))
    for sums in (sender.sums, receiver.sums):
        ones = np.unpackbits(sums.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 6 * 0.5 / (2000 * 4 * 32) ** 0.5
        assert len(np.unique(sums)) > 7990


def flipped(message: bytes, place: int) -> bytes:
    changed = bytearray(message)
    changed[place] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message[:-1],
        lambda message: message[1:],
        lambda message: message + b"\x00",
        lambda message: b"",
        lambda message: message[: -129 * 16],
        lambda message: flipped(message, 0),  # of u for the first tree
        lambda message: flipped(message, -129 * 16 - 1),  # of u for the last tree: its random block
        lambda message: flipped(message, -129 * 16),  # of h(x)
        lambda message: flipped(message, -1),  # of h(t_127)
        lambda message: bytes(len(message)),
    ],
)
def test_a_damaged_message_is_refused_for_good(change: Callable[[bytes], bytes]) -> None:
    sender, receiver = parties(6)
    bits, values = random_rows(10, 6, 1, np.random.default_rng(1))
    message = receiver.extend(bits)
    with pytest.raises(ProtocolError):
        sender.answer(change(message), values)
    with pytest.raises(OutOfStep):
        sender.answer(message, values)
    assert not sender.sums.any()


def test_other_rows_columns_targets_or_turns_are_refused_though_lengths_agree() -> None:
    bits, values = random_rows(3, 6, 1, np.random.default_rng(2))
    first, second = parties(6), parties(6)
    with pytest.raises(InvalidMessage):  # of three rows for four: both are one block
        first[0].answer(first[1].extend(bits), np.vstack((values, values[:1])))
    with pytest.raises(InvalidMessage):  # of another exchange
        second[0].answer(first[1].extend(bits), values)
    sender, receiver = parties(6)
    message = receiver.extend(bits)
    receiver.take(sender.answer(message, values))
    with pytest.raises(InvalidMessage):  # again
        sender.answer(message, values)
    sender, receiver = parties(6)
    receiver.extend(bits)
    with pytest.raises(InvalidMessage):  # the second before the first
        sender.answer(receiver.extend(bits), values)
    for width, targets in ((5, 1), (6, 2)):
        sender = Sender(6)
        receiver = Receiver(width, sender.request, targets)
        sender.accept(receiver.reply)
        with pytest.raises(InvalidMessage):
            sender.answer(receiver.extend(bits[:, :width]), values)


def test_messages_out_of_turn_are_refused() -> None:
    sender = Sender(2)
    receiver = Receiver(2, sender.request)
    with pytest.raises(OutOfStep):
        sender.answer(b"", np.zeros((1, 1), np.uint32))
    with pytest.raises(OutOfStep):
        receiver.take(b"")
    sender.accept(receiver.reply)
    with pytest.raises(OutOfStep):
        sender.accept(receiver.reply)
    receiver.extend(np.ones((3, 2), np.bool_))
    for answer in (b"", bytes(4 * 6 - 1), bytes(4 * 6 + 1)):
        receiver.extend(np.ones((3, 2), np.bool_))
        with pytest.raises(ProtocolError):
            receiver.take(answer)


def test_a_party_refuses_what_it_cannot_compute_itself() -> None:
    sender, receiver = parties(2, 3)
    for bits in (np.ones((2**19 + 1, 2), np.bool_), np.ones((0, 2), np.bool_)):
        with pytest.raises(ValueError, match="rows"):
            receiver.extend(bits)
    with pytest.raises(ValueError, match="bits"):
        receiver.extend(np.ones((4, 3), np.bool_))
    with pytest.raises(ValueError, match="targets"):
        sender.answer(b"", np.zeros((1, 1), np.uint32))
    for width, targets in ((0, 1), (1, 0), (2**20 + 1, 1)):
        with pytest.raises(ValueError, match="no sums"):
            Sender(width, targets)


NO_POINTS = {
    "the identity": "00" * 32,
    "not canonical, high bit": "00" + "ff" * 31,
    "not canonical, p": "ed" + "ff" * 30 + "7f",
    "negative, 1": "01" + "00" * 31,
    "x squared is no square": "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
}


@pytest.mark.parametrize("name", NO_POINTS)
@pytest.mark.parametrize("place", [0, 127])
def test_what_is_no_point_is_refused(name: str, place: int) -> None:
    sender = Sender(1)
    point = bytes.fromhex(NO_POINTS[name])
    request = sender.request[: 32 * place] + point + sender.request[32 * place + 32 :]
    with pytest.raises(InvalidMessage):
        Receiver(1, request)
    reply = Receiver(1, sender.request).reply
    with pytest.raises(InvalidMessage):
        sender.accept(reply[: 32 * place] + point + reply[32 * place + 32 :])
    with pytest.raises(OutOfStep):
        sender.accept(reply)


def test_base_transfers_of_other_lengths_are_refused() -> None:
    request = Sender(1).request
    for changed in (b"", request[:-1], request + b"\x00"):
        with pytest.raises(ProtocolError):
            Receiver(1, changed)
    reply = Receiver(1, request).reply
    for changed in (b"", reply[:-1], reply[: 128 * 32], reply + b"\x00"):
        with pytest.raises(ProtocolError):
            Sender(1).accept(changed)


@pytest.mark.parametrize("place", [5, 32 * 255 + 1])
def test_a_damaged_request_is_refused_by_one_of_the_parties(place: int) -> None:
    sender = Sender(1)
    with pytest.raises(InvalidMessage):
        sender.accept(Receiver(1, flipped(sender.request, place)).reply)


# In the points, in both sums of one level, of which the sender needs only one, and in the proof.
@pytest.mark.parametrize("place", [7, 128 * 32, 128 * 32 + 16, 128 * 32 + 96, -1])
def test_a_damaged_reply_is_refused_before_an_answer(place: int) -> None:
    sender = Sender(1)
    receiver = Receiver(1, sender.request)
    bits, values = np.ones((1, 1), np.bool_), np.ones((1, 1), np.uint32)
    message = receiver.extend(bits)
    try:
        sender.accept(flipped(receiver.reply, place))
    except InvalidMessage:
        return
    with pytest.raises(InvalidMessage):
        sender.answer(message, values)


def test_a_half_that_makes_the_agreed_point_the_identity_is_refused() -> None:
    """The key of such a pair would be known to everybody."""
    request = Sender(1).request
    other = request[32:64]
    digest = base_transfers.digest("half", bytes((0, 0)), other, length=64)
    with pytest.raises(InvalidMessage):
        Receiver(1, ristretto.load().hash_to_group(digest) + request[32:])


def test_no_key_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []

    def observed(key: bytes, inputs: extension.Bytes, first: int, words: int) -> extension.Words:
        keys.append((key, first))
        return hashed(key, inputs, first, words)

    hashed = extension.tweakable_hash
    monkeypatch.setattr(extension, "tweakable_hash", observed)
    bits = np.zeros((5, 4), np.bool_)
    messages = []
    for _ in range(3):
        _, receiver = parties(4)
        messages += [receiver.extend(bits) for _ in range(4)]
    assert len(set(keys)) == len(set(messages)) == 12
    monkeypatch.setattr(extension, "_HASHED_AT_ONCE", 8)
    keys.clear()
    receiver.extend(bits)
    assert len({key for key, _ in keys}) == 1
    assert [first for _, first in keys] == [0, 8, 16]
