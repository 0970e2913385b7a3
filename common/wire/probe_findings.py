"""Says in words what a probe has found, on either side; each finding is a line of ``check``."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from cryptography import x509

from splitveil.common.errors import ContractMismatch, DataError, PeerUntrusted, SettingsError
from splitveil.common.party.credentials import dns_names, printable, subject_of
from splitveil.common.run.contract import Contract, check_same_contract
from splitveil.common.run.messages import ID_MARKS, IdForm
from splitveil.common.text.version import VERSION
from splitveil.common.text.visible_text import visible
from splitveil.common.wire.limits import PROTOCOL_VERSION
from splitveil.common.wire.probes import Introduction

Check = Callable[[], str]  # returns a finding, or raises it if it would end a run
CLOCK_TOLERANCE_S = 60.0
"""Difference of the clocks from which a certificate may be judged wrongly at either side."""


def certificate_in_words(pem: bytes, owner: str) -> str:
    """Describe a peer's certificate that was verified, or raise PeerUntrusted."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        names = ", ".join(map(printable, dns_names(found)))
    except ValueError as error:
        raise PeerUntrusted("the peer's certificate cannot be read") from error
    ends = found.not_valid_after_utc
    left = (ends - datetime.now(UTC)).days
    issuer = printable(found.issuer.rfc4514_string())
    return (
        f"certificate of {owner}: {subject_of(found)} ({names}), signed by {issuer}, valid to "
        f"{ends:%Y-%m-%d}, {left} days left"
    )


def checks_of(own: Contract, form: Introduction, peer: Introduction, owner: str) -> Iterator[Check]:
    """Yield the checks of what both parties have said about themselves."""

    def versions() -> str:
        if peer.protocol_version != PROTOCOL_VERSION:
            raise ContractMismatch(["protocol_version"])
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
            raise DataError(f"ids: {here} here; {there} at {owner}: {remedy}")
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
    """Return what makes ids of two forms equal; empty if they may be so as they are."""
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
    """Describe the difference of the clocks.

    Args:
        ahead_s: seconds by which the peer's clock is ahead of this machine's.
    """
    side = "ahead of" if ahead_s >= 0 else "behind"
    text = f"the other party's is {abs(ahead_s):.2f} s {side} this machine's (± {error_s:.2f} s)"
    if abs(ahead_s) - error_s > CLOCK_TOLERANCE_S:
        raise SettingsError(f"clock: {text}: certificates are judged by it; set it right")
    return f"clock: {text}"
