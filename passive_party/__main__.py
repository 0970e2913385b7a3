"""``python -m splitveil.passive_party``, which is ``passive-party``."""

from splitveil.passive_party.commands.program import main

if __name__ == "__main__":
    main()
