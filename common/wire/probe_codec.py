"""Encodes probes of the connection, and checks and decodes those of the peer."""

from typing import NamedTuple

from splitveil.common.errors import InvalidMessage
from splitveil.common.run.messages import ID_CHARACTERS, IdForm
from splitveil.common.text.version import VERSION
from splitveil.common.wire.limits import PROTOCOL_VERSION, VERSION_CHARACTERS
from splitveil.protos import split_learning_pb2 as pb

SERVICE = "splitveil.v1.Diagnosis"


class Introduction(NamedTuple):
    """What a party says about itself."""

    party: str
    contract: str  # its canonical contract
    clock_s: float  # its clock, in seconds since 1970
    id_form: IdForm | None  # how its ids are written; None if it does not know
    version: str = VERSION[:VERSION_CHARACTERS]
    protocol_version: int = PROTOCOL_VERSION


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
    """Decode what the peer says about itself, or raise InvalidMessage."""
    if not received.contract:
        raise InvalidMessage("an introduction without a contract")
    if not ID_CHARACTERS.keys() >= {*received.id_form.most, *received.id_form.some}:
        raise InvalidMessage("unknown kinds of characters in ids")
    form = IdForm(*(getattr(received.id_form, name) for name in IdForm._fields))
    return Introduction(
        party=received.party,
        contract=received.contract,
        clock_s=received.clock_ms / 1000,
        id_form=form if received.HasField("id_form") else None,
        version=received.version,
        protocol_version=received.protocol_version,
    )


def method_path() -> str:
    return f"/{SERVICE}/Probe"
