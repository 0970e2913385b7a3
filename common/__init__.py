"""Code that both parties use.

Importing this package disables TLS 1.2 in gRPC's connections. grpcio has no setting for the minimum
version, only an environment variable for the cipher suites of TLS 1.2. The only suite that is left
there needs a key that both ends share beforehand. There is no such key, so that only TLS 1.3, whose
suites are always enabled, can be negotiated. gRPC reads the variable when it is imported: if that
was before it was set here, ``splitveil.common.wire.endpoint`` refuses to make credentials.
"""

import os
import sys

SUITES = "GRPC_SSL_CIPHER_SUITES"
NEVER_AGREED = "ECDHE-PSK-CHACHA20-POLY1305"

GRPC_CAME_FIRST = "grpc" in sys.modules and os.environ.get(SUITES) != NEVER_AGREED
"""True if gRPC may agree to TLS 1.2, because it was imported before the variable was set."""

os.environ[SUITES] = NEVER_AGREED
