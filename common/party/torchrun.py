"""``torchrun``, but its exit code is the first of a rank that says more than 1.

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
        # Ranks that lose another one end with 1, and those that the launcher ends below 0.
        codes = [one.exitcode for one in error.failures.values()]
        sys.exit(next((code for code in codes if code > 1), 1))
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
