"""The engine ``rr22``: private set intersection by vector OLE, for many ids.

The protocol is that of Raghuraman and Rindal (CCS 2022), as SecretFlow's ``spu`` wheel has it. The
wheel wants an older Python and numpy than this project, opens TCP ports and works on files. So it
runs in a process of its own, in an environment that the operator makes (``worker.py``); it talks
to loopback ports alone, and their bytes travel as frames of the authenticated exchange
(``tunnel.py``).

It protects parties that follow the protocol. Nothing binds a party to its ids, as ecdh's commitment
does, and an exchange that breaks off begins afresh.
"""

from splitveil.common.alignment.rr22.exchange import Rr22Engine
from splitveil.common.alignment.rr22.process import check_interpreter

__all__ = ["Rr22Engine", "check_interpreter"]
