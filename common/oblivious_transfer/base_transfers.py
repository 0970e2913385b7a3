"""Base transfers: one party gets, of each pair of seeds, the one that it chose; nobody knows more.

The oblivious transfer of Masny and Rindal (CCS 2019, ePrint 2019/706, figure 8) for two messages,
from the Diffie-Hellman key agreement on ristretto255 with generator G, once for each pair i:

    request  r_0, r_1       of the chooser: r_(1-c) random, r_c = b G - H_c(r_(1-c)), c its choice
    reply    A = a G        of the other party
    seeds    KDF_c(b A)     for the chooser, KDF_0(a M_0) and KDF_1(a M_1) for the other,
                            where M_0 = r_0 + H_0(r_1) and M_1 = r_1 + H_1(r_0)

H_c is the uniform map of RFC 9496 from a digest, with the number i in it. Of M_0 and M_1 the
chooser knows the discrete logarithm of one: each is fixed, through the hash, by the other half of
the pair. The halves are equally distributed whatever c. Secure against malicious parties in the
random oracle model, under the computational Diffie-Hellman assumption, in the *endemic* sense: a
malicious party may choose the seeds that it knows, which extensions of transfers tolerate.
"""

import secrets

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from splitveil.common.alignment import ristretto
from splitveil.common.errors import InvalidMessage

NUM_PAIRS = 128
SEED_BYTES = 16
_IDENTITY = bytes(ristretto.POINT_BYTES)


def digest(purpose: str, *parts: bytes, length: int) -> bytes:
    """Hash parts of fixed lengths to as many bytes, by another function for each purpose."""
    context = f"splitveil oblivious transfer 1: {purpose}"
    return blake3(b"".join(parts), derive_key_context=context).digest(length=length)


class Chooser:
    """The party that chooses one seed of each pair, by (NUM_PAIRS,) bits."""

    def __init__(self, choices: NDArray[np.bool_]) -> None:
        self._group = ristretto.load()
        self._choices = [int(choice) for choice in choices]
        self._scalars = [self._group.random_scalar() for _ in self._choices]
        pairs = []
        for number, (choice, scalar) in enumerate(zip(self._choices, self._scalars, strict=True)):
            other = self._group.hash_to_group(secrets.token_bytes(ristretto.DIGEST_BYTES))
            known = self._group.multiply(ristretto.GENERATOR, scalar)
            own = self._group.subtract(known, _hash_of_half(number, choice, other))
            pairs += [other, own] if choice else [own, other]
        self.request = b"".join(pairs)

    def seeds(self, reply: bytes) -> list[bytes]:
        """Return the chosen seeds; raises InvalidMessage."""
        points = _points_of(reply, NUM_PAIRS)
        try:
            shared = list(map(self._group.multiply, points, self._scalars))
        except ristretto.NotInGroupError as error:
            raise InvalidMessage("the reply of the base transfers holds no points") from error
        transcript = digest("base transfers", self.request, reply, length=32)
        return [
            _seed(number, choice, transcript, point)
            for number, (choice, point) in enumerate(zip(self._choices, shared, strict=True))
        ]


def offer(request: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the reply and both seeds of each pair; raises InvalidMessage."""
    group = ristretto.load()
    halves = _points_of(request, 2 * NUM_PAIRS)
    scalars = [group.random_scalar() for _ in range(NUM_PAIRS)]
    reply = b"".join(group.multiply(ristretto.GENERATOR, scalar) for scalar in scalars)
    transcript = digest("base transfers", request, reply, length=32)
    pairs = []
    try:
        for number, scalar in enumerate(scalars):
            zero, one = halves[2 * number : 2 * number + 2]
            agreed = (
                group.add(zero, _hash_of_half(number, 0, one)),
                group.add(one, _hash_of_half(number, 1, zero)),
            )
            shared = group.multiply(b"".join(agreed), scalar)
            first, second = shared[: ristretto.POINT_BYTES], shared[ristretto.POINT_BYTES :]
            seeds = _seed(number, 0, transcript, first), _seed(number, 1, transcript, second)
            pairs.append(seeds)
    except ristretto.NotInGroupError as error:
        raise InvalidMessage("the request of the base transfers holds no points") from error
    return reply, pairs


def _hash_of_half(number: int, choice: int, half: bytes) -> bytes:
    place = bytes((number, choice))
    return ristretto.load().hash_to_group(
        digest("half of a pair", place, half, length=ristretto.DIGEST_BYTES)
    )


def _seed(number: int, choice: int, transcript: bytes, shared: bytes) -> bytes:
    return digest("seed", bytes((number, choice)), transcript, shared, length=SEED_BYTES)


def _points_of(message: bytes, count: int) -> list[bytes]:
    size = ristretto.POINT_BYTES
    if len(message) != count * size:
        raise InvalidMessage(f"base transfers: expected {count} points, got {len(message)} bytes")
    points = [message[size * number : size * (number + 1)] for number in range(count)]
    if _IDENTITY in points:
        raise InvalidMessage("base transfers: the identity is no point of a peer")
    return points
