"""Base transfers: of every sixteen seeds that one party has, the other gets all but a secret one.

The oblivious transfer of Masny and Rindal (CCS 2019, ePrint 2019/706, figure 8) for two messages,
from the Diffie-Hellman key agreement on ristretto255 with generator G, once for each of 128 pairs:

    request  r_0, r_1       of the chooser: r_(1-c) random, r_c = b G + H_c(r_(1-c)), c its choice
    reply    A = a G        of the other party
    keys     KDF_c(b A)     for the chooser, KDF_0(a M_0) and KDF_1(a M_1) for the other,
                            where M_0 = r_0 - H_0(r_1) and M_1 = r_1 - H_1(r_0)

H_c is the uniform map of RFC 9496 from a digest that covers the pair's number. It ties each of M_0
and M_1 to the other half of the pair, so that the chooser knows the discrete logarithm of only one,
and the halves are equally distributed whatever c. Secure against malicious parties with random
oracles, under the computational Diffie-Hellman assumption, in the *endemic* sense: who is malicious
may choose the keys that it knows, which SoftSpokenOT allows for.

Four pairs make a tree (Roy, SoftSpokenOT, ePrint 2022/192, figures 13 and 14), in which each node
gives two children. The first pair is the top; for each later level the reply has the sums (XOR) of
all left and of all right children, each encrypted with a key of that level's pair. Who misses one
node and has one of the keys learns one of its children, so that the chooser misses one leaf, which
the keys that it did not choose name. A digest of each leaf proves the tree: their sum gives the
missing one, and the hash of all must be met, which false sums do only by a guess of the choices.
"""

import hmac
import secrets
from functools import reduce

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.turns import check_length
from splitveil.common.errors import InvalidMessage

NUM_PAIRS = 128
DEPTH = 4
NUM_TREES = NUM_PAIRS // DEPTH
KEY_BYTES = 16
_PROOF_BYTES = 2 * KEY_BYTES
_TREE_BYTES = 2 * (DEPTH - 1) * KEY_BYTES + 2 * _PROOF_BYTES
REPLY_BYTES = NUM_PAIRS * ristretto.POINT_BYTES + NUM_TREES * _TREE_BYTES
_IDENTITY = bytes(ristretto.POINT_BYTES)
Seeds = list[list[bytes]]  # (NUM_TREES, 2**DEPTH)


class Chooser:
    """The party that misses, in each tree, the leaf that its secret bits (NUM_PAIRS,) name."""

    def __init__(self, secret: NDArray[np.uint8]) -> None:
        self._group, self._secret = ristretto.load(), [int(bit) for bit in secret]
        self._scalars = [self._group.random_scalar() for _ in self._secret]
        halves = []
        for number, (bit, scalar) in enumerate(zip(self._secret, self._scalars, strict=True)):
            other = self._group.hash_to_group(secrets.token_bytes(ristretto.DIGEST_BYTES))
            known = self._group.multiply(ristretto.GENERATOR, scalar)
            minus = self._group.subtract(_IDENTITY, _hash_of_half(number, 1 - bit, other))
            own = self._group.subtract(known, minus)
            halves += [own, other] if bit else [other, own]
        self.request = b"".join(halves)

    def seeds(self, reply: bytes) -> Seeds:
        """Return each tree's seeds, leaf y's at y XOR the secret one; the first is empty.

        Raises InvalidMessage or TooLarge; do not use the object again then.
        """
        check_length("the base transfers' reply", reply, REPLY_BYTES)
        points, trees = reply[: -NUM_TREES * _TREE_BYTES], reply[-NUM_TREES * _TREE_BYTES :]
        try:
            shared = list(map(self._group.multiply, _points_of(points), self._scalars))
        except ristretto.NotInGroupError as error:
            raise InvalidMessage(f"the base transfers' reply: {error}") from error
        session = digest("session", self.request, points, length=_PROOF_BYTES)
        keys = [
            _key(session, number, 1 - bit, point)
            for number, (bit, point) in enumerate(zip(self._secret, shared, strict=True))
        ]
        seeds, found, claimed = [], [], []
        for tree in range(NUM_TREES):
            part = _split(trees[_TREE_BYTES * tree : _TREE_BYTES * (tree + 1)], KEY_BYTES)
            bits = self._secret[DEPTH * tree : DEPTH * (tree + 1)]
            nodes, missing = [b"", keys[DEPTH * tree]], bits[0]
            for level, bit in enumerate(bits[1:], start=1):
                nodes = _children(session + bytes((tree,)), nodes, missing, bit)
                encrypted = part[2 * level - 1 - bit]
                nodes[1] = _xor(encrypted, keys[DEPTH * tree + level], *nodes[3::2])
                missing = 2 * missing + bit
            leaves, proofs = _leaves(session + bytes((tree,)), nodes, missing)
            proofs[0] = _xor(b"".join(part[-4:-2]), *proofs[1:])
            ordered = [proofs[leaf ^ missing] for leaf in range(len(leaves))]
            found.append(digest("proof", *ordered, length=_PROOF_BYTES))
            claimed += part[-2:]
            seeds.append([b"", *leaves[1:]])
        if not hmac.compare_digest(b"".join(found), b"".join(claimed)):
            raise InvalidMessage("the base transfers' reply: the proof does not fit the trees")
        return seeds


def offer(request: bytes) -> tuple[bytes, Seeds]:
    """Return the reply and the seeds of all leaves; raises InvalidMessage or TooLarge."""
    check_length("the base transfers' request", request, 2 * NUM_PAIRS * ristretto.POINT_BYTES)
    group, halves = ristretto.load(), _points_of(request)
    scalars = [group.random_scalar() for _ in range(NUM_PAIRS)]
    reply = [group.multiply(ristretto.GENERATOR, scalar) for scalar in scalars]
    session = digest("session", request, *reply, length=_PROOF_BYTES)
    keys = []
    try:
        for number, scalar in enumerate(scalars):
            pair = halves[2 * number : 2 * number + 2]
            for choice, half in enumerate(pair):
                agreed = group.subtract(half, _hash_of_half(number, choice, pair[1 - choice]))
                keys.append(_key(session, number, choice, group.multiply(agreed, scalar)))
    except ristretto.NotInGroupError as error:
        raise InvalidMessage(f"the base transfers' request: {error}") from error
    seeds = []
    for tree in range(NUM_TREES):
        own = keys[2 * DEPTH * tree : 2 * DEPTH * (tree + 1)]
        nodes = own[:2]
        for level in range(1, DEPTH):
            nodes = _children(session + bytes((tree,)), nodes)
            reply += (_xor(own[2 * level + side], *nodes[side::2]) for side in (0, 1))
        leaves, proofs = _leaves(session + bytes((tree,)), nodes)
        reply += [_xor(*proofs), digest("proof", *proofs, length=_PROOF_BYTES)]
        seeds.append(leaves)
    return b"".join(reply), seeds


def digest(purpose: str, *parts: bytes, length: int) -> bytes:
    """Hash parts, each of a fixed length, by another function for each purpose."""
    context = f"splitveil oblivious transfer 1: {purpose}"
    return blake3(b"".join(parts), derive_key_context=context).digest(length=length)


def _hash_of_half(number: int, choice: int, half: bytes) -> bytes:
    uniform = digest("half", bytes((number, choice)), half, length=ristretto.DIGEST_BYTES)
    return ristretto.load().hash_to_group(uniform)


def _key(session: bytes, number: int, choice: int, shared: bytes) -> bytes:
    return digest("key", session, bytes((number, choice)), shared, length=KEY_BYTES)


def _children(tree: bytes, nodes: list[bytes], missing: int = 0, bit: int = 0) -> list[bytes]:
    """Return the next level of a tree; both levels are in the order of place XOR missing."""
    children = []
    for place, node in enumerate(nodes):
        where = bytes((len(nodes), place ^ missing))
        pair = _split(digest("children", tree, where, node, length=2 * KEY_BYTES), KEY_BYTES)
        children += pair[::-1] if bit else pair
    return children


def _leaves(tree: bytes, nodes: list[bytes], missing: int = 0) -> tuple[list[bytes], list[bytes]]:
    """Return the seeds of the leaves, and their digests, which prove them."""
    both = [
        digest("leaf", tree, bytes((place ^ missing,)), node, length=KEY_BYTES + _PROOF_BYTES)
        for place, node in enumerate(nodes)
    ]
    return [leaf[:KEY_BYTES] for leaf in both], [leaf[KEY_BYTES:] for leaf in both]


def _xor(*parts: bytes) -> bytes:
    total = reduce(int.__xor__, (int.from_bytes(part, "little") for part in parts))
    return total.to_bytes(len(parts[0]), "little")


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[first : first + size] for first in range(0, len(data), size)]


def _points_of(message: bytes) -> list[bytes]:
    points = _split(message, ristretto.POINT_BYTES)
    if _IDENTITY in points:
        raise InvalidMessage("the base transfers: a point is the identity")
    return points
