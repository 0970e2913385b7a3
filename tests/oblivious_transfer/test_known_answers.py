"""The parts of an oblivious transfer against published vectors and a slow version of the whole."""

import secrets
from collections.abc import Iterable
from functools import reduce

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from splitveil.common.oblivious_transfer import Receiver, Sender, base_transfers, extension


def aes(key: bytes, block: bytes) -> bytes:
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305
    return encryptor.update(block) + encryptor.finalize()


def xor(*blocks: bytes) -> bytes:
    return bytes(reduce(int.__xor__, column) for column in zip(*blocks, strict=True))


def product(x: int, y: int) -> int:
    """Multiply in GF(2^128) bit by bit, as in algorithm 1 of NIST SP 800-38D."""
    result, factor = 0, y
    for place in range(127, -1, -1):
        if x >> place & 1:
            result ^= factor
        factor = factor >> 1 ^ (0xE1 << 120 if factor & 1 else 0)
    return result


def ghash(point: bytes, blocks: Iterable[bytes]) -> bytes:
    total = 0
    for block in blocks:
        total = product(total ^ int.from_bytes(block), int.from_bytes(point))
    return total.to_bytes(16)


def linear_hash(key: bytes, column: bytes) -> bytes:
    blocks = [column[first : first + 16] for first in range(0, len(column), 16)]
    return ghash(aes(key, bytes(16)), [*blocks, bytes(16)])


def test_the_oracles_meet_the_published_vectors() -> None:
    # FIPS 197, appendix C.1.
    key, block = bytes(range(16)), bytes.fromhex("00112233445566778899aabbccddeeff")
    assert aes(key, block).hex() == "69c4e0d86a7b0430d8cdb78070b4c55a"
    # McGrew and Viega, The Galois/Counter Mode of Operation, test case 2.
    point = aes(bytes(16), bytes(16))
    ciphertext = bytes.fromhex("0388dace60b6a392f328c2b971b2fe78")
    lengths = bytes.fromhex("00000000000000000000000000000080")
    assert ghash(point, [ciphertext, lengths]).hex() == "f38cbb1ad69223dcc3457ae5b6b0f885"


def test_the_universal_hash_is_the_polynomial_without_its_constant() -> None:
    columns = np.random.default_rng(1).integers(0, 256, (3, 64), dtype=np.uint8)
    found = extension.universal_hash(b"a public key 128", columns)
    for column, digest in zip(columns, found, strict=True):
        assert digest.tobytes() == linear_hash(b"a public key 128", column.tobytes())
    assert np.array_equal(
        extension.universal_hash(b"a public key 128", columns[:1] ^ columns[1:2])[0],
        found[0] ^ found[1],
    )


def test_rows_are_hashed_with_their_numbers() -> None:
    key, first = bytes(range(16)), 2**33 - 1
    inputs = np.random.default_rng(2).integers(0, 256, (3, 16), dtype=np.uint8)
    inputs[0] = np.frombuffer(bytes.fromhex("00112233445566778899aabbccddeeff"), np.uint8)
    found = extension.tweakable_hash(key, inputs, first, 6)
    for number, row in enumerate(inputs, start=first):
        once = aes(key, row.tobytes())
        words = b"".join(
            xor(
                aes(key, xor(once, number.to_bytes(8, "little") + part.to_bytes(8, "little"))), once
            )
            for part in (0, 1)
        )
        assert found[number - first].astype("<u4").tobytes() == words[:24]


def test_columns_become_rows() -> None:
    columns = np.random.default_rng(3).integers(0, 256, (128, 5), dtype=np.uint8)
    bits = np.unpackbits(columns, axis=1, bitorder="little")
    rows = np.unpackbits(extension.transpose(columns), axis=1, bitorder="little")
    assert np.array_equal(rows, bits.T)


def test_the_chooser_has_all_seeds_but_the_secret_ones() -> None:
    secret = np.random.default_rng(4).integers(0, 2, 128, dtype=np.uint8)
    chooser = base_transfers.Chooser(secret)
    reply, offered = base_transfers.offer(chooser.request)
    chosen = chooser.seeds(reply)
    for tree, bits in enumerate(secret.reshape(32, 4)):
        missing = int("".join(map(str, bits)), 2)
        assert chosen[tree][0] == b""
        assert all(chosen[tree][y ^ missing] == offered[tree][y] for y in range(16) if y != missing)
    assert len({seed for tree in offered for seed in tree}) == 32 * 16


class SlowExchange:
    """The equations of ``extension.py`` written out, bit by bit and transfer by transfer."""

    def __init__(self, seeds: base_transfers.Seeds, width: int, targets: int, sent: bytes) -> None:
        self.seeds, self.width, self.targets = seeds, width, targets
        self.transcript = width.to_bytes(8, "little") + targets.to_bytes(8, "little") + sent
        self.used = 0

    def stream(self, seed: bytes, size: int) -> bytes:
        counters = range(self.used // 16, (self.used + size) // 16)
        return b"".join(aes(seed, counter.to_bytes(16)) for counter in counters)

    def extend(self, bits: npt.NDArray[np.bool_], last: bytes) -> bytes:
        num_bits = bits.size
        size = 16 * (-(-num_bits // 128) + 1)
        choices = bytearray(size)
        for place, bit in enumerate(bits.ravel()):
            choices[place // 8] |= int(bit) << place % 8
        choices[-16:] = last
        self.columns, sums = [], []
        for tree in self.seeds:
            streams = [self.stream(seed, size) for seed in tree]
            self.columns += [
                xor(*(stream for y, stream in enumerate(streams) if y >> 3 - level & 1))
                for level in range(4)
            ]
            sums.append(xor(*streams))
        self.used += size
        sent = b"".join(xor(total, bytes(choices)) for total in sums)
        self.transcript += len(bits).to_bytes(8, "little") + sent
        keys = blake3(
            self.transcript, derive_key_context="splitveil oblivious transfer 1: challenge"
        ).digest(length=32)
        self.hash_key = keys[16:]
        hashes = (linear_hash(keys[:16], column) for column in (bytes(choices), *self.columns))
        return sent + b"".join(hashes)

    def masks(self, row: int, column: int, difference: bytes) -> list[int]:
        place = row * self.width + column
        block = bytearray(difference)
        for number, bits in enumerate(self.columns):
            block[number // 8] ^= (bits[place // 8] >> place % 8 & 1) << number % 8
        once = aes(self.hash_key, bytes(block))
        words = []
        for target in range(self.targets):
            tweak = place.to_bytes(8, "little") + (target // 4).to_bytes(8, "little")
            mask = xor(aes(self.hash_key, xor(once, tweak)), once)
            words.append(int.from_bytes(mask[4 * (target % 4) :][:4], "little"))
        return words


def test_an_exchange_equals_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    width, targets, delta, last = 7, 5, bytes(range(100, 116)), bytes(range(16))
    rng = np.random.default_rng(5)
    offered = []

    def offer(request: bytes) -> tuple[bytes, base_transfers.Seeds]:
        offered.append(real_offer(request))
        return offered[0]

    real_offer = base_transfers.offer
    monkeypatch.setattr(base_transfers, "offer", offer)
    monkeypatch.setattr(secrets, "token_bytes", lambda size: (delta * 4)[:size])
    sender = Sender(width, targets)
    monkeypatch.setattr(secrets, "token_bytes", lambda _: last)
    receiver = Receiver(width, sender.request, targets)
    sender.accept(receiver.reply)
    slow = SlowExchange(offered[0][1], width, targets, sender.request + receiver.reply)
    of_sender = np.zeros((width, targets), np.int64)
    for rows in (3, 21):
        bits = rng.random((rows, width)) < 0.5
        values = rng.integers(0, 2**32, (rows, targets), dtype=np.uint32)
        message = receiver.extend(bits)
        assert message == slow.extend(bits, last)
        answer = np.frombuffer(sender.answer(message, values), "<u4")
        expected = []
        for row in range(rows):
            for column in range(width):
                # q_j = t_j + x_j delta, so that delta is added to the one that is not chosen.
                of_zero = slow.masks(row, column, delta if bits[row, column] else bytes(16))
                of_one = slow.masks(row, column, bytes(16) if bits[row, column] else delta)
                differences = zip(of_zero, of_one, map(int, values[row]), strict=True)
                expected += [(zero - one + value) % 2**32 for zero, one, value in differences]
                of_sender[column] += of_zero
        assert answer.tolist() == expected
    assert np.array_equal(sender.sums, of_sender % 2**32)
