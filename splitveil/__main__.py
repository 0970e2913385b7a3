"""``python -m splitveil``."""

from splitveil.command.program import main

if __name__ == "__main__":
    main()
