"""Encodes probes of the connection, and checks and decodes those of the peer."""

from typing import NamedTuple

from splitveil.common.errors import InvalidMessage
from splitveil.common.run.messages import IdForm
from splitveil.common.text.version import VERSION
from splitveil.common.wire.limits import PROTOCOL_VERSION, VERSION_CHARACTERS
from splitveil.protos import split_learning_pb2 as pb

SERVICE = "splitveil.v1.Diagnosis"

_TO_WIRE: dict[IdForm, pb.IdForm] = {
    IdForm.WHOLE: pb.ID_FORM_WHOLE,
    IdForm.LEADING_ZEROS: pb.ID_FORM_LEADING_ZEROS,
    IdForm.DECIMAL_POINT: pb.ID_FORM_DECIMAL_POINT,
    IdForm.TEXT: pb.ID_FORM_TEXT,
}


class Introduction(NamedTuple):
    """What a party says about itself."""

    party: str
    contract: str
    """Its canonical contract."""
    clock_s: float
    """Its clock, in seconds since 1970."""
    id_form: IdForm | None
    """How its ids are written; None if it does not know."""
    version: str = VERSION[:VERSION_CHARACTERS]
    protocol_version: int = PROTOCOL_VERSION


def encode_introduction(own: Introduction) -> pb.Introduction:
    """Encode what this party says about itself."""
    return pb.Introduction(
        protocol_version=own.protocol_version,
        version=own.version,
        party=own.party,
        contract=own.contract,
        clock_ms=max(round(1000 * own.clock_s), 0),
        id_form=pb.ID_FORM_UNSPECIFIED if own.id_form is None else _TO_WIRE[own.id_form],
    )


def decode_introduction(received: pb.Introduction) -> Introduction:
    """Decode what the peer says about itself.

    Raises:
        InvalidMessage: it brings no contract.
    """
    if not received.contract:
        raise InvalidMessage("an introduction without a contract")
    forms = {number: form for form, number in _TO_WIRE.items()}
    return Introduction(
        party=received.party,
        contract=received.contract,
        clock_s=received.clock_ms / 1000,
        id_form=forms.get(received.id_form),
        version=received.version,
        protocol_version=received.protocol_version,
    )


def method_path() -> str:
    """Return the full name of the call, as gRPC expects it."""
    return f"/{SERVICE}/Probe"
