"""What both parties use, and nothing that only one of them does.

Importing it before ``grpc``, as both parties' packages do, shuts TLS 1.2 out of their connections.
grpcio has no setting for the lowest version, but one for the cipher suites of TLS 1.2, which gRPC
reads while it is imported. The one suite left there needs a key that both ends share beforehand.
There is none, and so only TLS 1.3, whose suites are always on, comes to an agreement.
"""

import os
import sys

_SUITES = "GRPC_SSL_CIPHER_SUITES"
_NEVER_AGREED = "ECDHE-PSK-CHACHA20-POLY1305"

TLS_1_2_IS_SHUT_OUT = "grpc" not in sys.modules or os.environ.get(_SUITES) == _NEVER_AGREED
"""Whether gRPC was imported later, and so has read the setting."""

os.environ[_SUITES] = _NEVER_AGREED
