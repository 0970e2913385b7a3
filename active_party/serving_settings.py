"""Settings of the active party's online predictions."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from splitveil.common.settings import Section
from splitveil.common.text.addresses import usable

_Address = Annotated[str, AfterValidator(usable)]


class ServingTls(Section):
    """The certificate that this party shows to the programs that ask for predictions."""

    certificate: Path
    """PEM file with the server's certificate first. It carries the host name that programs connect
    to. The path is relative to this settings file, like the others. A replaced file is used without
    a restart."""

    private_key: Path
    """PEM file with the certificate's key, without a password; mode 0600 or stricter."""

    clients: Path | None = None
    """PEM file with the authorities of client certificates: a program without such a certificate is
    turned away. It is recorded under its certificate's common name. ``null`` to ask for none; a
    token is then needed."""


class ServingSettings(Section):
    """Online predictions for other programs of this party: ``splitveil active serve``."""

    http: _Address = "127.0.0.1:8080"
    """Host and port for HTTP."""

    tls: ServingTls | None = None
    """TLS 1.3; ``null`` for plain text, which stays on this machine."""

    token_file: Path | None = None
    """File with one line ``NAME TOKEN`` for each program that may ask, mode 0600; a token has at
    least 32 characters. Programs send ``Authorization: Bearer TOKEN``. The path is relative to this
    settings file. ``null`` for none."""

    max_ids: int = Field(default=1000, ge=1, le=100_000)
    """Largest number of ids in one request."""

    timeout_s: float = Field(default=1.0, gt=0, le=600)
    """Seconds after which a request without an answer from every passive party is given up."""

    batch_wait_ms: float = Field(default=0.0, ge=0, le=1000)
    """Milliseconds for which a request waits for others, to be sent together with them. Requests
    that arrive while earlier ones are under way are sent together in any case."""

    ids_per_second: float | None = Field(default=None, gt=0)
    """Largest number of ids per second on average for each program; ``null`` for no limit. One
    second's number may be asked for at once."""

    allowed_ids: Path | None = None
    """File with the ids that may be asked for, as ``splitveil active predict --ids`` takes it;
    every other id is answered as one that is not known, and no passive party is asked. The path is
    relative to this settings file. ``null`` for all."""

    record_ids: bool = False
    """Whether the transcript names the ids of each request; without it, it has their number."""

    fallback: bool = False
    """Whether to train a model of this party's own features alone at the end of a run, and to
    answer with it, marked as such, while a passive party is away or where it has no row of an id.
    """
