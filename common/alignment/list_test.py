"""Tests whether both parties have the same list of common ids, after an exchange of new ids only.

In an exchange of all ids, nobody knows a tag before it is bound to all of its own. A party that has
kept the tags of earlier exchanges does: it could give a new id of the other party the tag of
another id of its own, and the other one would take the two for one. So both compare their lists of
common ids, as if the list were one more id: each shows the list, hashed to the group and multiplied
by a fresh scalar, and then a digest over the doubly masked list and its own nonce. A party that
does not know the list can neither compute its digest nor test more than one guess for each
exchange.
"""

import hashlib
import hmac
from collections.abc import Iterable

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.kept import digest_of_ids
from splitveil.common.alignment.turns import check_length
from splitveil.common.errors import AlignmentError, InvalidMessage
from splitveil.protos import split_learning_pb2 as pb

_LIST_DOMAIN = b"splitveil alignment list 1\x00"
_PROOF_DOMAIN = b"splitveil alignment list proof 1\x00"


class ListTest:
    """One test, after one exchange.

    Args:
        exchange: the number of the exchange.
        own_nonce: of this party's hello.
        peer_nonce: of the peer's hello.

    Raises:
        InvalidMessage: the nonces are equal, so that a digest could be sent back.
    """

    def __init__(self, exchange: bytes, own_nonce: bytes, peer_nonce: bytes) -> None:
        if own_nonce == peer_nonce:
            raise InvalidMessage("the other party sends this party's own nonce back")
        self._exchange, self._own_nonce, self._peer_nonce = exchange, own_nonce, peer_nonce
        self._group = ristretto.load()
        self._scalar = self._group.random_scalar()
        self._masked = b""

    def point(self, ids: Iterable[str]) -> bytes:
        """Return this party's list, masked.

        Args:
            ids: the common ids, in the common order.
        """
        digest = hashlib.sha512(_LIST_DOMAIN + self._exchange + digest_of_ids(ids)).digest()
        return self._group.mask(digest, self._scalar)

    def answer(self, done: pb.AlignDone) -> pb.AlignListProof:
        """Take the peer's masked list, and return what shows this party's.

        Raises:
            InvalidMessage, TooLarge: it is no group element.
        """
        check_length("the list of common ids", done.list_point, ristretto.POINT_BYTES)
        try:
            self._masked = self._group.multiply(done.list_point, self._scalar)
        except ristretto.NotInGroupError as error:
            raise InvalidMessage(f"the list of common ids: {error}") from error
        return pb.AlignListProof(digest=self._digest(self._own_nonce))

    def check(self, proof: pb.AlignListProof) -> None:
        """Compare the lists.

        Raises:
            AlignmentError: they differ.
        """
        if not hmac.compare_digest(proof.digest, self._digest(self._peer_nonce)):
            raise AlignmentError(
                "the parties disagree on the intersection: some tags are not those of its ids"
            )

    def _digest(self, nonce: bytes) -> bytes:
        return hashlib.sha256(_PROOF_DOMAIN + self._exchange + nonce + self._masked).digest()
