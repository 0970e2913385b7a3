"""The errors that end a request, and their statuses.

    RequestError
    |- Unusable          422   the request cannot be understood
    |- TooManyIds        413   it has more ids than one request may have
    |- NotJson           415   its body is compressed, or no JSON
    |- NotAdmitted       401   the program does not say who it is
    |- TooFast           429   the program asks for more than it may
    `- NotAvailable      503   a passive party is away, or this party is busy

Their messages are for the program's operator: they name no id and no value.
"""


class RequestError(Exception):
    status = 500


class Unusable(RequestError):
    """The request cannot be understood."""

    status = 422


class TooManyIds(RequestError):
    status = 413


class NotJson(RequestError):
    """The body is not in the one form that is read."""

    status = 415


class NotAdmitted(RequestError):
    """The program does not say who it is, or is not known."""

    status = 401


class TooFast(RequestError):
    """The program asks for more ids per second than it may."""

    status = 429

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """Seconds after which the same request is accepted."""


class NotAvailable(RequestError):
    """There is no answer now; another attempt may succeed."""

    status = 503
