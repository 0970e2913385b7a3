"""What both parties use, and nothing that only one of them does.

Importing it shuts TLS 1.2 out of gRPC's connections. grpcio has no setting for the lowest version,
but an environment variable for the cipher suites of TLS 1.2. The one suite left there needs a key
that both ends share beforehand. There is none, and so only TLS 1.3, whose suites are always on,
comes to an agreement. gRPC reads the variable while it is imported: where it was imported earlier,
``splitveil.common.wire.tls`` has it read the variable again.
"""

import os
import sys

SUITES = "GRPC_SSL_CIPHER_SUITES"
NEVER_AGREED = "ECDHE-PSK-CHACHA20-POLY1305"

GRPC_CAME_FIRST = "grpc" in sys.modules
"""Whether gRPC may have read the variable before it was set here."""

os.environ[SUITES] = NEVER_AGREED
