"""``torchrun``, but its exit code is that of rank 0, or of the first rank that failed.

python -m splitveil.common.party.torchrun --nproc-per-node 4 -m splitveil.passive_party run ...
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> None:
    try:
        run(parse_args(None))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        code = error.failures[min(error.failures)].exitcode
        sys.exit(max(code, 1))  # a negative one is that of a signal
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
