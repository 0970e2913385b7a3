"""What a party that deviates from an oblivious transfer learns, with the checks and without."""

import hmac
import itertools
import secrets

import numpy as np
import numpy.typing as npt
import pytest

from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.oblivious_transfer import Receiver, Sender, base_transfers, extension

Bits = npt.NDArray[np.bool_]
WIDTH = 32


class ReadingReceiver(Receiver):
    """Chooses, in the transfer of row 0 and column k, otherwise for tree k than for the others.

    The sender's mask of that transfer then depends on the tree's four bits of delta, and so does
    the sum of the column: sixteen candidates, of which only the right one leaves a small number.
    """

    def extend(self, bits: Bits) -> bytes:
        size = self._column_bytes(len(bits))
        choices = np.zeros(size, np.uint8)
        choices[: -(-bits.size // 8)] = np.packbits(bits, bitorder="little")
        self.columns, sums = self._streams.next(size)
        for tree in range(WIDTH):
            sums[tree, tree // 8] ^= 1 << tree % 8
        sent = (sums ^ choices).tobytes()
        check_key, self.key = self._keys(len(bits), sent)
        (self.masks,) = self._masks(self.columns, self.key, len(bits), np.zeros(16, np.uint8))
        self.sums += self.masks.sum(axis=0, dtype=np.uint32)
        self._unanswered.append(bits)
        check = extension.universal_hash(check_key, np.vstack((choices, self.columns)))
        return sent + check.tobytes()

    def read_delta(self, noisy: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """Find the sender's delta from sums that hold noise."""
        rows = extension.transpose(self.columns)[:WIDTH]
        delta = np.zeros(16, np.uint8)
        for tree in range(WIDTH):
            left = {}
            for guess in range(16):
                nibble = int(f"{guess:04b}"[::-1], 2)  # the first level is the lowest bit
                part = np.zeros(16, np.uint8)
                part[tree // 2] = nibble << 4 * (tree % 2)
                mask = extension.tweakable_hash(self.key, rows[tree : tree + 1] ^ part, tree, 1)
                change = int(mask[0, 0]) - int(self.masks[0, tree, 0])
                rest = (int(noisy[tree, 0]) + change + 2**31) % 2**32 - 2**31
                left[abs(rest)] = part
            delta |= left[min(left)]
        return delta

    def read_values(self, answer: bytes, delta: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
        """Find the sender's values of all rows but the first from the answer's first column."""
        (bits,) = self._unanswered
        rows = extension.transpose(self.columns)[: bits.size]
        other = extension.tweakable_hash(self.key, rows ^ delta, 0, 1).reshape(bits.shape)
        zero, one = (
            np.where(bits, *pair) for pair in itertools.permutations((other, self.masks[:, :, 0]))
        )
        differences = np.frombuffer(answer, "<u4").reshape(bits.shape)
        return (differences - zero + one)[1:, 0]


def read(
    seed: int,
) -> tuple[Sender, npt.NDArray[np.uint8], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    rng = np.random.default_rng(seed)
    sender = Sender(WIDTH)
    receiver = ReadingReceiver(WIDTH, sender.request)
    sender.accept(receiver.reply)
    bits, labels = rng.random((40, WIDTH)) < 0.5, rng.integers(0, 2, (40, 1), np.uint32)
    bits[0] = False
    answer = sender.answer(receiver.extend(bits), labels)
    held = (
        receiver.sums
        + (np.frombuffer(answer, "<u4").reshape(bits.shape) * bits).sum(axis=0, dtype=np.uint32)[
            :, None
        ]
    )
    noisy = held.astype(np.int64) - sender.sums + rng.normal(0, 50, (WIDTH, 1)).astype(np.int64)
    delta = receiver.read_delta(noisy)
    return sender, delta, receiver.read_values(answer, delta), labels[1:, 0]


def test_a_receiver_that_chooses_otherwise_for_some_trees_is_caught() -> None:
    with pytest.raises(InvalidMessage, match="do not fit together"):
        read(1)


def test_without_the_check_it_reads_every_label_from_noisy_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extension, "check_consistency", lambda *_: None)
    sender, delta, found, labels = read(1)
    assert np.array_equal(delta, sender._delta)
    assert np.array_equal(found, labels)


def test_a_receiver_passes_by_the_right_guess_of_a_trees_bits_alone() -> None:
    """With another x for one tree, and hashes that would be right if its guess were."""
    rng = np.random.default_rng(2)
    columns = rng.integers(0, 256, (128, 48), dtype=np.uint8)
    choices, error = rng.integers(0, 256, (2, 1, 48), dtype=np.uint8)
    delta = rng.integers(0, 2, 128, dtype=np.uint8)
    in_tree = np.arange(128) // 4 == 11
    received = columns ^ delta[:, None] * (choices ^ in_tree[:, None] * error)
    key = b"a public key 128"
    of_received = extension.universal_hash(key, received)
    of_choices, of_error = extension.universal_hash(key, np.vstack((choices, error)))
    passed = []
    for guess in itertools.product((0, 1), repeat=4):
        of_columns = extension.universal_hash(key, columns)
        of_columns[in_tree] ^= np.array(guess, np.uint8)[:, None] * of_error
        try:
            extension.check_consistency(of_received, np.vstack((of_choices, of_columns)), delta)
        except InvalidMessage:
            continue
        passed.append(guess)
    assert passed == [tuple(delta[in_tree])]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_false_sum_of_children_is_met_only_by_a_chooser_that_does_not_use_it(level: int) -> None:
    secret = np.random.default_rng(3).integers(0, 2, 128, dtype=np.uint8)
    for side in (0, 1):
        chooser = base_transfers.Chooser(secret)
        reply = bytearray(base_transfers.offer(chooser.request)[0])
        reply[128 * 32 + (2 * (level - 1) + side) * 16] ^= 1
        if side == secret[level]:  # it needs the sum of the other side
            chooser.seeds(bytes(reply))
        else:
            with pytest.raises(InvalidMessage, match="proof"):
                chooser.seeds(bytes(reply))


@pytest.mark.parametrize("place", [-1, -33])
def test_a_false_proof_is_refused(place: int) -> None:
    sender = Sender(1)
    reply = bytearray(Receiver(1, sender.request).reply)
    reply[place] ^= 1
    with pytest.raises(InvalidMessage, match="proof"):
        sender.accept(bytes(reply))
    with pytest.raises(OutOfStep):
        sender.answer(b"", np.zeros((1, 1), np.uint32))


def test_without_the_proof_false_sums_tell_the_secret_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender would go on and its streams fit or not, which it shows by going on once more."""
    monkeypatch.setattr(hmac, "compare_digest", lambda *_: True)
    secret = np.random.default_rng(4).integers(0, 2, 128, dtype=np.uint8)
    chooser = base_transfers.Chooser(secret)
    reply, offered = base_transfers.offer(chooser.request)
    changed = bytearray(reply)
    for tree in range(32):
        changed[128 * 32 + 160 * tree] ^= 1  # the sum of the left children of level 1
    found = chooser.seeds(bytes(changed))
    fits = [set(found[tree][1:]) < set(offered[tree]) for tree in range(32)]
    assert fits == [bit == 0 for bit in secret.reshape(32, 4)[:, 1]]


def a_receiver(
    offered: tuple[bytes, base_transfers.Seeds], monkeypatch: pytest.MonkeyPatch
) -> Receiver:
    with monkeypatch.context() as patched:
        patched.setattr(base_transfers, "offer", lambda _: offered)
        return Receiver(8, b"")


def test_a_sender_that_answers_falsely_changes_no_later_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = base_transfers.offer(Sender(8).request)
    rng = np.random.default_rng(5)
    bits = rng.random((3, 20, 8)) < 0.5
    honest, deceived = (a_receiver(offered, monkeypatch) for _ in range(2))
    monkeypatch.setattr(secrets, "token_bytes", bytes)
    for chunk in bits:
        assert honest.extend(chunk) == deceived.extend(chunk)
        honest.take(bytes(20 * 8 * 4))
        deceived.take(rng.bytes(20 * 8 * 4))
    assert not np.array_equal(honest.sums, deceived.sums)


def test_a_receivers_messages_are_uniform_whatever_it_chooses() -> None:
    for bits in (np.zeros((400, 64), np.bool_), np.ones((400, 64), np.bool_)):
        message = Receiver(64, Sender(64).request).extend(bits)
        size = (len(message) - 129 * 16) // 32
        sent = np.unpackbits(
            np.frombuffer(message, np.uint8)[: 32 * size].reshape(32, size), axis=1
        )
        assert abs(sent.mean() - 0.5) < 6 * 0.5 / sent.size**0.5
        of_pairs = np.asarray(np.corrcoef(sent)) - np.eye(32)
        assert np.abs(of_pairs).max() < 6 / sent.shape[1] ** 0.5


@pytest.mark.parametrize("hidden", [True, False])
def test_random_bits_hide_the_choices_in_their_hash(
    hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that guesses a chunk compares hashes: right without the random bits at its end."""
    receiver = Receiver(16, Sender(16).request)
    if not hidden:
        monkeypatch.setattr(secrets, "token_bytes", bytes)
    keys = []

    def observed(key: bytes, columns: extension.Bytes) -> extension.Bytes:
        keys.append(key)
        return hashed(key, columns)

    hashed = extension.universal_hash
    monkeypatch.setattr(extension, "universal_hash", observed)
    bits = np.random.default_rng(6).random((16, 16)) < 0.5
    message = receiver.extend(bits)
    guess = np.concatenate((np.packbits(bits, bitorder="little"), np.zeros(16, np.uint8)))
    of_choices = message[-129 * 16 : -128 * 16]
    assert (hashed(keys[0], guess[None])[0].tobytes() == of_choices) is not hidden
