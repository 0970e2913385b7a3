"""Sums over secretly chosen rows of secret values, from 128 base transfers and symmetric ciphers.

The receiver has bits b (rows, width), the sender values v (rows, targets), integers modulo 2^32. At
the end the receiver has R and the sender H, both (width, targets), with R - H = sum_i b_ij v_it.
Each is uniformly distributed by itself; whoever gets the other's learns these sums and nothing
else. A choice is 0 or 1 whatever the receiver does: what one row adds to a sum is bounded.

The extension of Ishai, Kilian, Nissim and Petrank (CRYPTO 2003) with the consistency check of the
corrected Keller, Orsini and Scholl (ePrint 2015/546, figure 10), which is SoftSpokenOT (Roy, ePrint
2022/192) over the field of two elements, with its proof:

    base      the sender chooses delta, 128 random bits, and gets of 128 pairs of seeds that of its
              bit; the receiver has both. Each seed is the key of a stream, AES in counter mode
    extend    x: the bits of the chunk, padding, and 128 random bits. For each pair i the receiver
              sends u_i = t_i + t'_i + x, where t_i and t'_i are the next bits of both streams
    check     and, for the challenge that follows from all that was sent so far (Fiat-Shamir),
              h(x) and h(t_i), where h is linear, a universal hash
    answer    the sender has q_i = t_i + delta_i x, and refuses if h(q_i) != h(t_i) + delta_i h(x).
              Row j of these 128 columns is q_j = t_j + x_j delta. It sends, for each transfer j,
              e_j = F(q_j, j) - F(q_j + delta, j) + v, and keeps F(q_j, j), which adds up to H
    take      the receiver has F(t_j, j) + x_j e_j = F(q_j, j) + x_j v, which adds up to R

h is GHASH (NIST SP 800-38D, section 6.4): a polynomial, in a point that the challenge gives, over
the field of 2^128 elements. Two columns of n blocks of 128 bits collide with probability n / 2^128,
and the random bits at the end hide x. A receiver whose columns differ passes by a guess of the bits
of delta where they do, else delta is thrown away with everything else. It can try challenges
without the sender: 2^20 transfers are 2^13 blocks, 128 columns 2^13 pairs, and one try finds two
columns that collide with probability 2^-102.

F(y, j) = P(P(y) + j) + P(y) is the tweakable hash of Guo, Katz, Wang and Yu (S&P 2020, ePrint
2019/074, section 7.4), correlation robust if the block cipher P is ideal. Its key follows from the
same challenge, so that no two chunks or exchanges share one, and in a chunk no j is used twice.

The receiver's messages are pseudo-random and depend on nothing that the sender sends after the base
transfers: a sender that answers falsely learns nothing about the bits, and changes the sums.
Not reviewed by a cryptographer.
"""

import hmac
import secrets
from collections import deque

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.oblivious_transfer import base_transfers
from splitveil.common.oblivious_transfer.base_transfers import NUM_PAIRS

MAX_TRANSFERS = 2**20
"""Of one chunk: rows times width. Messages have 16 bytes for each and 4 back for each target."""

_BLOCK_BYTES = 16  # of AES, of GHASH, and of a row of the 128 columns
_CHECK_BYTES = (1 + NUM_PAIRS) * _BLOCK_BYTES
_HASHED_AT_ONCE = 2**15  # transfers: few enough to stay in the processor's cache

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]


class Sender:
    """The party with the values, which also learns nothing about the bits.

    Whatever raises InvalidMessage ends the exchange for good: another needs another object.
    """

    def __init__(self, width: int, targets: int = 1) -> None:
        self._delta = np.frombuffer(secrets.token_bytes(NUM_PAIRS // 8), np.uint8)
        self._chooser = base_transfers.Chooser(_bits_of(self._delta).astype(bool))
        self._exchange = _Exchange(width, targets, self._chooser.request)
        self._streams: _Streams | None = None
        self.request = self._chooser.request
        self.sums = np.zeros((width, targets), np.uint32)

    def accept(self, reply: bytes) -> None:
        """Take the receiver's half of the base transfers; raises InvalidMessage."""
        if self._exchange.has_begun:
            raise OutOfStep("the base transfers took place before")
        self._exchange.begin(reply)
        self._streams = _Streams(self._chooser.seeds(reply))

    def answer(self, extension: bytes, values: Words) -> bytes:
        """Answer the next chunk, which has as many rows as values, (rows, targets).

        Raises InvalidMessage before anything depends on the values if the receiver's columns do not
        fit together, and OutOfStep ever after.
        """
        streams, self._streams = self._streams, None
        if streams is None:
            raise OutOfStep(
                "there are no base transfers, or a message of this exchange was refused"
            )
        values = self._exchange.check_values(values)
        size = self._exchange.column_bytes(len(values))
        if len(extension) != NUM_PAIRS * size + _CHECK_BYTES:
            raise InvalidMessage(
                f"a chunk of {len(values)} rows has {NUM_PAIRS * size + _CHECK_BYTES} bytes, "
                f"not {len(extension)}"
            )
        received = np.frombuffer(extension, np.uint8)
        sent, check = received[:-_CHECK_BYTES].reshape(NUM_PAIRS, size), received[-_CHECK_BYTES:]
        challenge, hash_key = self._exchange.challenge(len(values), extension[:-_CHECK_BYTES])
        delta_bits = _bits_of(self._delta)
        columns = streams.next(size)
        # Masks and no branch or index: the time does not depend on the bits of delta.
        columns ^= sent & (0 - delta_bits)[:, None]
        check_consistency(
            universal_hash(challenge, columns), check.reshape(-1, _BLOCK_BYTES), delta_bits
        )
        own, other = self._exchange.masks(columns, hash_key, len(values), self._delta)
        self.sums += own.sum(axis=0, dtype=np.uint32)
        self._streams = streams
        return (own - other + values[:, None, :]).astype("<u4").tobytes()


class Receiver:
    """The party with the bits, (rows, width) in each chunk."""

    def __init__(self, width: int, request: bytes, targets: int = 1) -> None:
        self.reply, pairs = base_transfers.offer(request)
        self._exchange = _Exchange(width, targets, request)
        self._exchange.begin(self.reply)
        self._streams = tuple(_Streams(list(seeds)) for seeds in zip(*pairs, strict=True))
        self._unanswered: deque[NDArray[np.bool_]] = deque()
        self.sums = np.zeros((width, targets), np.uint32)

    def extend(self, bits: NDArray[np.bool_]) -> bytes:
        """Return the message that chooses the next rows; may run ahead of the answers."""
        rows, size = len(bits), self._exchange.column_bytes(len(bits))
        choices = np.zeros(size, np.uint8)
        packed = np.packbits(bits.astype(bool), bitorder="little")
        choices[: len(packed)] = packed
        choices[-_BLOCK_BYTES:] = np.frombuffer(secrets.token_bytes(_BLOCK_BYTES), np.uint8)
        columns, others = (streams.next(size) for streams in self._streams)
        others ^= columns
        others ^= choices
        sent = others.tobytes()
        challenge, hash_key = self._exchange.challenge(rows, sent)
        check = universal_hash(challenge, np.vstack((choices, columns)))
        (masks,) = self._exchange.masks(columns, hash_key, rows)
        self.sums += masks.sum(axis=0, dtype=np.uint32)
        self._unanswered.append(bits.astype(bool))
        return sent + check.tobytes()

    def take(self, answer: bytes) -> None:
        """Take the answer to the oldest unanswered message; raises InvalidMessage, OutOfStep."""
        if not self._unanswered:
            raise OutOfStep("there are no unanswered rows")
        bits = self._unanswered.popleft()
        shape = (*bits.shape, self.sums.shape[1])
        if len(answer) != 4 * np.prod(shape):
            raise InvalidMessage(
                f"an answer for {len(bits)} rows has {4 * np.prod(shape)} bytes, not {len(answer)}"
            )
        differences = np.frombuffer(answer, "<u4").reshape(shape)
        self.sums += (differences * bits[:, :, None]).sum(axis=0, dtype=np.uint32)


class _Exchange:
    """What both parties compute alike: sizes, challenges, and the hashes of rows."""

    def __init__(self, width: int, targets: int, request: bytes) -> None:
        if not 0 < width <= MAX_TRANSFERS or targets < 1:
            raise ValueError(f"no sums of {width} columns for {targets} targets")
        self._width, self._targets = width, targets
        self._transcript = blake3(derive_key_context="splitveil oblivious transfer 1: challenge")
        self._transcript.update(_number(width) + _number(targets) + request)
        self.has_begun = False

    def begin(self, reply: bytes) -> None:
        self.has_begun = True
        self._transcript.update(reply)

    def check_values(self, values: Words) -> Words:
        if values.dtype != np.uint32 or values.shape != (len(values), self._targets):
            raise ValueError(f"expected (rows, {self._targets}) values of uint32")
        return values

    def column_bytes(self, rows: int) -> int:
        """Return the length of a column: the transfers in whole blocks, and a random one."""
        transfers = rows * self._width
        if not 0 < transfers <= MAX_TRANSFERS:
            raise ValueError(f"a chunk has 1 to {MAX_TRANSFERS // self._width} rows, not {rows}")
        return (-(-transfers // NUM_PAIRS) + 1) * _BLOCK_BYTES

    def challenge(self, rows: int, sent: bytes) -> tuple[bytes, bytes]:
        """Return the keys of the check and of the rows' hash, from all that was sent so far."""
        self._transcript.update(_number(rows) + sent)
        keys = self._transcript.digest(length=2 * _BLOCK_BYTES)
        return keys[:_BLOCK_BYTES], keys[_BLOCK_BYTES:]

    def masks(self, columns: Bytes, key: bytes, rows: int, *differences: Bytes) -> list[Words]:
        """Hash each transfer's row of the columns, and its sum with each of the differences.

        Returns arrays (rows, width, targets).
        """
        transfers = rows * self._width
        zero = np.zeros(_BLOCK_BYTES, np.uint8)
        masks = [np.empty((transfers, self._targets), np.uint32) for _ in (zero, *differences)]
        for first in range(0, transfers, _HASHED_AT_ONCE):
            last = min(first + _HASHED_AT_ONCE, transfers)
            inputs = transpose(columns[:, first // 8 : -(-last // 8)])[: last - first]
            for mask, difference in zip(masks, (zero, *differences), strict=True):
                mask[first:last] = tweakable_hash(key, inputs ^ difference, first, self._targets)
        return [mask.reshape(rows, self._width, self._targets) for mask in masks]


class _Streams:
    """The endless pseudo-random bits of several seeds; none is given out twice."""

    def __init__(self, seeds: list[bytes]) -> None:
        start = modes.CTR(bytes(_BLOCK_BYTES))
        self._ciphers = [Cipher(algorithms.AES(seed), start).encryptor() for seed in seeds]

    def next(self, size: int) -> Bytes:
        """Return the next bytes of each, (seeds, size)."""
        zeros, streams = bytes(size), np.empty((len(self._ciphers), size), np.uint8)
        for stream, cipher in zip(streams, self._ciphers, strict=True):
            stream[:] = np.frombuffer(cipher.update(zeros), np.uint8)
        return streams


def check_consistency(of_columns: Bytes, check: Bytes, delta_bits: Bytes) -> None:
    """Compare h(q_i) with h(t_i) + delta_i h(x), given check: h(x), h(t_0), ..., h(t_127).

    Raises InvalidMessage.
    """
    expected = check[1:] ^ (check[0] & (0 - delta_bits)[:, None])
    if not hmac.compare_digest(of_columns.tobytes(), expected.tobytes()):
        raise InvalidMessage("the columns of the transfers do not fit together")


def universal_hash(key: bytes, columns: Bytes) -> Bytes:
    """Return GHASH of each column, (columns, 16), at the point that the key gives.

    A tag of AES-GCM is GHASH of the data and their length, plus a constant of key and length, which
    the tag of zeros takes away: what is left is linear.
    """
    cipher, nonce = AESGCM(key), bytes(12)
    zeros = np.zeros_like(columns[:1])
    tags = b"".join(cipher.encrypt(nonce, b"", column.tobytes()) for column in (*columns, *zeros))
    found = np.frombuffer(tags, np.uint8).reshape(-1, _BLOCK_BYTES)
    linear: Bytes = found[:-1] ^ found[-1]
    return linear


def tweakable_hash(key: bytes, inputs: Bytes, first: int, num_words: int) -> Words:
    """Hash inputs (n, 16) with the tweaks first, first + 1, ... to (n, num_words) words.

    Four words come from one hash; more, from further tweaks of the same number.
    """
    # The mode ECB is the permutation itself, here of public key, for many blocks at once.
    permute = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305
    once = np.frombuffer(permute(inputs.tobytes()), "<u8").reshape(-1, 2)
    numbers = np.arange(first, first + len(inputs), dtype=np.uint64)
    parts = []
    for part in range(-(-num_words // 4)):
        tweaked = once ^ np.stack((numbers, np.full_like(numbers, part)), axis=1)
        twice = np.frombuffer(permute(tweaked.tobytes()), "<u8").reshape(-1, 2)
        parts.append((twice ^ once).view("<u4"))
    return np.concatenate(parts, axis=1)[:, :num_words]


def transpose(columns: Bytes) -> Bytes:
    """Turn 128 columns of n bits, (128, n / 8), into n rows of 128 bits, (n, 16).

    Bit i of a byte is place 8 k + i. Eight columns' bytes of the same eight rows are one word, in
    which three exchanges transpose 8 by 8 bits (Warren, Hacker's Delight, section 7-3).
    """
    gathered = columns.reshape(NUM_PAIRS // 8, 8, -1).transpose(2, 0, 1)
    words = np.ascontiguousarray(gathered).view("<u8")[:, :, 0]
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0xF0F0F0F0)):
        swapped = (words ^ (words >> np.uint64(shift))) & np.uint64(mask)
        words ^= swapped ^ (swapped << np.uint64(shift))
    rows = words.view(np.uint8).reshape(-1, NUM_PAIRS // 8, 8).transpose(0, 2, 1)
    return np.ascontiguousarray(rows).reshape(-1, _BLOCK_BYTES)


def _bits_of(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, bitorder="little")


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
