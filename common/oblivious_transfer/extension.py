"""Sums over secretly chosen rows of secret values, from base transfers and symmetric ciphers.

The receiver has bits b (rows, width), the sender values v (rows, targets), integers modulo 2^32. At
the end the receiver has R and the sender H, both (width, targets), with R - H = sum_i b_ij v_it.
Each is uniformly distributed by itself; whoever gets the other's learns these sums and nothing
else. A choice is 0 or 1 whatever the receiver does: what one row adds to a sum is bounded.

SoftSpokenOT (Roy, CRYPTO 2022, ePrint 2022/192) over the field of 16 elements: the extension of
Ishai, Kilian, Nissim and Petrank (CRYPTO 2003) with a quarter of its bytes, and the consistency
check as in figure 10 of the corrected Keller, Orsini and Scholl (ePrint 2015/546).

    base      the sender draws delta, 128 bits, 4 for each of 32 trees. The receiver has 16 seeds of
              each tree, the sender all but the one that its bits of delta name. Each seed is the
              key of a stream, AES in counter mode; t_(4k+l) is the sum (XOR) of the streams of tree
              k whose number has its l-th bit, s_k the sum of all
    extend    the receiver sends u_k = s_k + x, where x is a chunk's bits, padding, and 128 random
              bits; and, for the challenge that follows from all that it sent so far (Fiat-Shamir),
              h(x) and h(t_i), where h is a linear universal hash
    answer    the sender has, from the streams that it knows and from u, q_i = t_i + delta_i x, and
              refuses if h(q_i) != h(t_i) + delta_i h(x). Row j of these 128 columns is
              q_j = t_j + x_j delta. It sends, for each transfer j,
              e_j = F(q_j, j) - F(q_j + delta, j) + v, and keeps F(q_j, j), which adds up to H
    take      the receiver has F(t_j, j) + x_j e_j = F(q_j, j) + x_j v, which adds up to R

h is GHASH (NIST SP 800-38D, section 6.4): a polynomial, in a point that the challenge gives, over
the field of 2^128 elements. Two columns of n blocks of 128 bits collide with probability n / 2^128,
and the random bits at the end hide x. A receiver that uses another x for a tree passes by a guess
of that tree's bits of delta; at a wrong guess delta is never used again. It can try challenges
alone: 2^20 transfers are 2^13 blocks, 32 trees 2^9 pairs, and one try finds two of their x that
collide with probability 2^-106.

F(y, j) = P(P(y) + j) + P(y) is the tweakable hash of Guo, Katz, Wang and Yu (S&P 2020, ePrint
2019/074, section 7.4), correlation robust if the block cipher P is ideal. Its key follows from the
same challenge, so that no two chunks or exchanges share one, and in a chunk no j is used twice.

The receiver's messages are pseudo-random and depend on no answer: a sender that answers falsely
changes the sums and learns nothing about the bits. Not reviewed by a cryptographer.
"""

import hmac
import secrets
from collections import deque

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from splitveil.common.alignment.turns import check_length
from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.oblivious_transfer import base_transfers
from splitveil.common.oblivious_transfer.base_transfers import DEPTH, NUM_PAIRS, NUM_TREES

MAX_TRANSFERS = 2**20
"""Of one chunk: rows times width. Messages have 4 bytes for each, and 4 back for each target."""

_BLOCK_BYTES = 16  # of AES, of GHASH, and of a row of the 128 columns
_CHECK_BYTES = (1 + NUM_PAIRS) * _BLOCK_BYTES
_HASHED_AT_ONCE = 2**15  # transfers: few enough to stay in the processor's cache

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]


class _Party:
    """Computations that both parties share: sizes, challenges, and the hashes of rows."""

    def __init__(self, width: int, targets: int) -> None:
        if not 0 < width <= MAX_TRANSFERS or targets < 1:
            raise ValueError(f"no sums of {width} columns for {targets} targets")
        self.sums = np.zeros((width, targets), np.uint32)
        self._transcript = blake3(derive_key_context="splitveil oblivious transfer 1: challenge")
        self._transcript.update(np.array([width, targets], "<u8").tobytes())

    def _column_bytes(self, rows: int) -> int:
        """Return the length of a column: transfers in whole blocks, and a random block."""
        if not 0 < rows * len(self.sums) <= MAX_TRANSFERS:
            raise ValueError(f"a chunk has 1 to {MAX_TRANSFERS // len(self.sums)} rows, not {rows}")
        return (-(-rows * len(self.sums) // NUM_PAIRS) + 1) * _BLOCK_BYTES

    def _keys(self, rows: int, sent: bytes) -> tuple[bytes, bytes]:
        """Return the keys of the check and of the rows' hash, from all that was sent so far."""
        self._transcript.update(np.array([rows], "<u8").tobytes() + sent)
        keys = self._transcript.digest(length=2 * _BLOCK_BYTES)
        return keys[:_BLOCK_BYTES], keys[_BLOCK_BYTES:]

    def _masks(self, columns: Bytes, key: bytes, rows: int, *differences: Bytes) -> list[Words]:
        """Hash each row of the columns plus each difference, to (rows, width, targets) words."""
        width, targets = self.sums.shape
        masks = [np.empty((rows * width, targets), np.uint32) for _ in differences]
        for first in range(0, rows * width, _HASHED_AT_ONCE):
            last = min(first + _HASHED_AT_ONCE, rows * width)
            inputs = transpose(columns[:, first // 8 : -(-last // 8)])[: last - first]
            for mask, difference in zip(masks, differences, strict=True):
                mask[first:last] = tweakable_hash(key, inputs ^ difference, first, targets)
        return [mask.reshape(rows, width, targets) for mask in masks]


class Sender(_Party):
    """The party with the values, which learns nothing about the bits.

    Whatever is refused ends the exchange: nothing is answered ever after.
    """

    def __init__(self, width: int, targets: int = 1) -> None:
        super().__init__(width, targets)
        self._delta = np.frombuffer(secrets.token_bytes(_BLOCK_BYTES), np.uint8)
        self._delta_bits = np.unpackbits(self._delta, bitorder="little")
        self._chooser: base_transfers.Chooser | None = base_transfers.Chooser(self._delta_bits)
        self._streams: _Streams | None = None
        self.request = self._chooser.request

    def accept(self, reply: bytes) -> None:
        """Take the receiver's part of the base transfers; raises ProtocolError."""
        chooser, self._chooser = self._chooser, None
        if chooser is None:
            raise OutOfStep("the base transfers took place before")
        self._streams = _Streams(chooser.seeds(reply))
        self._transcript.update(self.request + reply)

    def answer(self, extension: bytes, values: Words) -> bytes:
        """Answer the next chunk, which has as many rows as the values, (rows, targets).

        Raises ProtocolError before anything depends on the values, and then at any later call.
        """
        streams, self._streams = self._streams, None
        if streams is None:
            raise OutOfStep("no base transfers took place, or a message was refused")
        rows = len(values)
        if values.dtype != np.uint32 or values.shape != (rows, self.sums.shape[1]):
            raise ValueError(f"expected values of uint32 for {self.sums.shape[1]} targets")
        size = self._column_bytes(rows)
        check_length("choices", extension, NUM_TREES * size + _CHECK_BYTES)
        check_key, hash_key = self._keys(rows, extension[:-_CHECK_BYTES])
        received = np.frombuffer(extension, np.uint8)
        sent = np.repeat(received[:-_CHECK_BYTES].reshape(NUM_TREES, size), DEPTH, axis=0)
        columns, _ = streams.next(size)
        # Masks and no branch or index: here, unlike in the base transfers, which happen once for a
        # fresh delta, the time does not depend on its bits.
        columns ^= sent & (0 - self._delta_bits)[:, None]
        check = received[-_CHECK_BYTES:].reshape(-1, _BLOCK_BYTES)
        check_consistency(universal_hash(check_key, columns), check, self._delta_bits)
        own, other = self._masks(columns, hash_key, rows, 0 * self._delta, self._delta)
        self.sums += own.sum(axis=0, dtype=np.uint32)
        self._streams = streams
        return (own - other + values[:, None, :]).astype("<u4").tobytes()


class Receiver(_Party):
    """The party with the bits, (rows, width) in each chunk."""

    def __init__(self, width: int, request: bytes, targets: int = 1) -> None:
        super().__init__(width, targets)
        self.reply, seeds = base_transfers.offer(request)
        self._transcript.update(request + self.reply)
        self._streams = _Streams(seeds)
        self._unanswered: deque[NDArray[np.bool_]] = deque()

    def extend(self, bits: NDArray[np.bool_]) -> bytes:
        """Return the message that chooses the next rows; may run ahead of the answers."""
        if bits.dtype != np.bool_ or bits.shape != (len(bits), len(self.sums)):
            raise ValueError(f"expected bits of {len(self.sums)} columns")
        choices = np.zeros(self._column_bytes(len(bits)), np.uint8)
        choices[: -(-bits.size // 8)] = np.packbits(bits, bitorder="little")
        choices[-_BLOCK_BYTES:] = np.frombuffer(secrets.token_bytes(_BLOCK_BYTES), np.uint8)
        columns, sums = self._streams.next(len(choices))
        sent = (sums ^ choices).tobytes()
        check_key, hash_key = self._keys(len(bits), sent)
        check = universal_hash(check_key, np.vstack((choices, columns)))
        (masks,) = self._masks(columns, hash_key, len(bits), np.zeros(_BLOCK_BYTES, np.uint8))
        self.sums += masks.sum(axis=0, dtype=np.uint32)
        self._unanswered.append(bits.copy())
        return sent + check.tobytes()

    def take(self, answer: bytes) -> None:
        """Take the answer to the oldest message that has none yet; raises ProtocolError."""
        if not self._unanswered:
            raise OutOfStep("there are no unanswered rows")
        bits = self._unanswered.popleft()[:, :, None]
        check_length("an answer to choices", answer, 4 * bits.size * self.sums.shape[1])
        differences = np.frombuffer(answer, "<u4").reshape(*bits.shape[:2], -1)
        self.sums += (differences * bits).sum(axis=0, dtype=np.uint32)


class _Streams:
    """The endless pseudo-random bits of the trees' seeds; none is given out twice."""

    def __init__(self, seeds: base_transfers.Seeds) -> None:
        start = modes.CTR(bytes(_BLOCK_BYTES))
        # Zeros stand for the first seed, which the sender misses: it is in none of the columns.
        keys = [[algorithms.AES(seed or bytes(16)) for seed in tree] for tree in seeds]
        self._ciphers = [[Cipher(key, start).encryptor() for key in tree] for tree in keys]

    def next(self, size: int) -> tuple[Bytes, Bytes]:
        """Return the next bytes of the columns, (NUM_PAIRS, size), and sums, (NUM_TREES, size)."""
        columns, sums = np.empty((NUM_PAIRS, size), np.uint8), np.empty((NUM_TREES, size), np.uint8)
        zeros = bytes(size)
        for tree, ciphers in enumerate(self._ciphers):
            bits = b"".join(cipher.update(zeros) for cipher in ciphers)
            streams = np.frombuffer(bits, np.uint8).reshape(-1, size)
            for level in range(DEPTH):
                lower, upper = streams[: len(streams) // 2], streams[len(streams) // 2 :]
                np.bitwise_xor.reduce(upper, axis=0, out=columns[DEPTH * tree + level])
                streams = lower ^ upper
            sums[tree] = streams[0]
        return columns, sums


def check_consistency(of_columns: Bytes, check: Bytes, delta_bits: Bytes) -> None:
    """Raise InvalidMessage unless h(q_i) = h(t_i) + delta_i h(x); check is h(x) and all h(t_i)."""
    expected = check[1:] ^ (check[0] & (0 - delta_bits)[:, None])
    if not hmac.compare_digest(of_columns.tobytes(), expected.tobytes()):
        raise InvalidMessage("the columns of the transfers do not fit together")


def universal_hash(key: bytes, columns: Bytes) -> Bytes:
    """Return GHASH of each column, (columns, 16), at the point that the key gives.

    The tag of AES-GCM is GHASH of the data plus what depends on key and length alone, which the tag
    of zeros takes away: what is left is linear. The key is public.
    """
    cipher, nonce, zeros = AESGCM(key), bytes(12), np.zeros_like(columns[:1])
    tags = b"".join(cipher.encrypt(nonce, b"", column.tobytes()) for column in (*columns, *zeros))
    found: Bytes = np.frombuffer(tags, np.uint8).reshape(-1, _BLOCK_BYTES)
    return found[:-1] ^ found[-1:]


def tweakable_hash(key: bytes, inputs: Bytes, first: int, num_words: int) -> Words:
    """Hash inputs (n, 16) with the tweaks first, first + 1, ... to (n, num_words) words.

    A hash gives four words; further ones come from further tweaks of the same number.
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

    Bit i of a byte is place 8 k + i. Eight columns' bytes of the same eight rows are one word;
    three exchanges transpose its 8 by 8 bits (Warren, Hacker's Delight, section 7-3).
    """
    gathered = columns.reshape(NUM_PAIRS // 8, 8, -1).transpose(2, 0, 1)
    words = np.ascontiguousarray(gathered).view("<u8")[:, :, 0]
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0xF0F0F0F0)):
        swapped = (words ^ (words >> np.uint64(shift))) & np.uint64(mask)
        words ^= swapped ^ (swapped << np.uint64(shift))
    rows = words.view(np.uint8).reshape(-1, NUM_PAIRS // 8, 8).transpose(0, 2, 1)
    return np.ascontiguousarray(rows).reshape(-1, _BLOCK_BYTES)
