"""Probes of the connection: their encoding and checks, the answers, and the findings in words.

The same probe gets the same reply at any time, and nothing changes by it.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
from cryptography import x509

from splitveil.common import errors
from splitveil.common.party.credentials import days_until, dns_names, printable, subject_of
from splitveil.common.run.contract import ACTIVE, Contract, check_same_contract
from splitveil.common.run.messages import ID_CHARACTERS, ID_MARKS, IdForm
from splitveil.common.text.visible_text import visible
from splitveil.common.text.wording import VERSION
from splitveil.common.wire import limits
from splitveil.protos import split_learning_pb2 as pb

logger = logging.getLogger(__name__)

SERVICE = "splitveil.v1.Diagnosis"


class Introduction(NamedTuple):
    party: str
    contract: str  # its canonical contract
    clock_s: float  # its clock, in seconds since 1970
    id_form: IdForm | None  # how its ids are written; None if it does not know
    version: str = VERSION[: limits.VERSION_CHARACTERS]
    protocol_version: int = limits.PROTOCOL_VERSION


def encode_introduction(own: Introduction) -> pb.Introduction:
    return pb.Introduction(
        protocol_version=own.protocol_version,
        version=own.version,
        party=own.party,
        contract=own.contract,
        clock_ms=max(round(1000 * own.clock_s), 0),
        id_form=None if own.id_form is None else pb.IdForm(**own.id_form._asdict()),
    )


def decode_introduction(received: pb.Introduction) -> Introduction:
    if not received.contract:
        raise errors.InvalidMessage("an introduction without a contract")
    if not ID_CHARACTERS.keys() >= {*received.id_form.most, *received.id_form.some}:
        raise errors.InvalidMessage("unknown kinds of characters in ids")
    form = IdForm(*(getattr(received.id_form, name) for name in IdForm._fields))
    return Introduction(
        party=received.party,
        contract=received.contract,
        clock_s=received.clock_ms / 1000,
        id_form=form if received.HasField("id_form") else None,
        version=received.version,
        protocol_version=received.protocol_version,
    )


Listener = Callable[[Introduction, grpc.ServicerContext], None]


class ProbeResponder:
    """Answers the probes of the passive parties.

    It has no part in a run: it touches no session, and a probe is no sign of life.
    """

    def __init__(
        self, contract: Contract, id_form: IdForm | None = None, listener: Listener | None = None
    ) -> None:
        self._contract = contract
        self._id_form = id_form
        self._listener = listener or self._log
        self.probed_at = time.monotonic()  # when the last probe came, by the monotonic clock

    def add_to(self, server: grpc.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(
            self.probe,
            limits.reader(pb.ProbeRequest, limits.PROBE_BYTES),
            pb.ProbeReply.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Probe": handler}),)
        )

    def probe(
        self, request: pb.ProbeRequest | limits.Refused, context: grpc.ServicerContext
    ) -> pb.ProbeReply:
        """Answer one probe, with no more bytes than it carries, or raise ProtocolError."""
        probe = limits.believed(request)
        has_peer = probe.HasField("introduction")
        peer = decode_introduction(probe.introduction) if has_peer else None
        self.probed_at = time.monotonic()
        reply = pb.ProbeReply(padding=probe.padding)
        if peer is not None:
            self._listener(peer, context)
            own = Introduction(ACTIVE, self._contract.canonical_json(), time.time(), self._id_form)
            reply.introduction.CopyFrom(encode_introduction(own))
        return reply

    def _log(self, peer: Introduction, _context: Any) -> None:
        fields = self._contract.fields_differing_from(peer.contract)
        differ = f"differ in {', '.join(fields)}" if fields else "agree"
        logger.info("probed by party %s: the contracts %s", visible(peer.party), differ)


Check = Callable[[], str]  # returns a finding, or raises it if it would end a run
CLOCK_TOLERANCE_S = 60.0
"""Least difference of the clocks that may make either side misjudge a certificate."""


def certificate_in_words(pem: bytes, owner: str) -> str:
    """Describe a peer's certificate that was verified, or raise PeerUntrusted."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        names = ", ".join(map(printable, dns_names(found)))
    except ValueError as error:
        raise errors.PeerUntrusted("the peer's certificate cannot be read") from error
    ends = found.not_valid_after_utc
    issuer = printable(found.issuer.rfc4514_string())
    return (
        f"certificate of {owner}: {subject_of(found)} ({names}), signed by {issuer}, valid to "
        f"{ends:%Y-%m-%d}, {days_until(ends)} days left"
    )


def checks_of(own: Contract, form: Introduction, peer: Introduction, owner: str) -> Iterator[Check]:
    def versions() -> str:
        if peer.protocol_version != limits.PROTOCOL_VERSION:
            raise errors.ContractMismatch(["protocol_version"])
        theirs = visible(peer.version) or "unknown"
        return f"versions: splitveil {VERSION} here, {theirs} at {owner}; the same protocol"

    def contracts() -> str:
        check_same_contract(own, peer.contract, owner)
        return f"contract: {owner} holds the same"

    def ids() -> str:
        if form.id_form is None or peer.id_form is None:
            return "ids: their form was not compared"
        here, there = _in_words(form.id_form), _in_words(peer.id_form)
        remedy = _remedy(form.id_form, peer.id_form)
        if remedy:
            raise errors.DataError(f"ids: {here} here; {there} at {owner}: {remedy}")
        same = here == there
        return f"ids: {here} at both parties" if same else f"ids: {here} here; {there} at {owner}"

    yield from (versions, contracts, ids)


def _in_words(form: IdForm) -> str:
    letters = "letters and digits" if form.has_letters else "digits"
    kind = "hexadecimal digits" if form.hexadecimal else letters
    marks = "".join(sorted(form.characters.intersection(ID_MARKS)))
    found = (
        ("capital letters", "A" in form.characters),
        ("small letters", "a" in form.characters),
        ("characters beyond ASCII", "~" in form.characters),
        ("leading zeros", form.leading_zeros),
        ("decimal points as in 7.0", form.decimal_point),
        ("numbers shortened as in 1.2E+15", form.shortened),
        (f"the marks {marks.strip()}", marks.strip()),
        ("spaces", " " in marks),
    )
    details = ", ".join(words for words, is_so in found if is_so)
    return f"{form.length or ''} {kind}{' with ' * bool(details)}{details}".strip()


def _remedy(own: IdForm, peer: IdForm) -> str:
    differ = (set(own.most) - peer.characters) | (set(peer.most) - own.characters)
    marks = "".join(sorted(differ.intersection(ID_MARKS)))
    rules = (
        ("unicode: nfkc", "~" in differ),
        ("fold_case: true", not differ.isdisjoint("Aa")),
        (f"drop_characters: {json.dumps(marks.strip())}", marks.strip()),
        ("space: remove", " " in marks),
        ("whole_numbers: true", own.decimal_point != peer.decimal_point),
        ("leading_zeros: drop", own.leading_zeros != peer.leading_zeros),
    )
    found = ", ".join(rule for rule, helps in rules if helps)
    if (
        own.hexadecimal != peer.hexadecimal
        or own.shortened != peer.shortened
        or "0" in differ
        or (not differ.isdisjoint("Aa") and own.has_letters != peer.has_letters)
        or (own.leading_zeros == peer.leading_zeros and 0 < own.length != peer.length > 0)
    ):
        return (
            "no rule of contract.ids makes them equal; export the ids of one party again, in full "
            "and in the form of the other's"
        )
    return f"contract.ids: {{{found}}} may make them equal" if found else ""


def clock_in_words(ahead_s: float, error_s: float) -> str:
    """Say by how many seconds the peer's clock is ahead of this machine's."""
    side = "ahead of" if ahead_s >= 0 else "behind"
    text = f"the other party's is {abs(ahead_s):.2f} s {side} this machine's (± {error_s:.2f} s)"
    if abs(ahead_s) - error_s > CLOCK_TOLERANCE_S:
        raise errors.SettingsError(f"clock: {text}: certificates are judged by it; set it right")
    return f"clock: {text}"
