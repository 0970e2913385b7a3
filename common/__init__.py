"""Code that both parties use.

Importing this package disables TLS 1.2 in gRPC's connections. grpcio has no setting for the minimum
version, only an environment variable for the cipher suites of TLS 1.2. The only suite that is left
there needs a key that both ends share beforehand. There is no such key, so that only TLS 1.3, whose
suites are always enabled, can be negotiated. gRPC reads the variable when it is imported; if it was
imported earlier, ``splitveil.common.wire.tls`` makes it read the variable again.
"""

import os
import sys

SUITES = "GRPC_SSL_CIPHER_SUITES"
NEVER_AGREED = "ECDHE-PSK-CHACHA20-POLY1305"

GRPC_CAME_FIRST = "grpc" in sys.modules
"""Whether gRPC may have read the variable before it was set here."""

os.environ[SUITES] = NEVER_AGREED
