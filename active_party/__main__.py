"""``python -m splitveil.active_party``, which is ``active-party``."""

from splitveil.active_party.commands.program import main

if __name__ == "__main__":
    main()
