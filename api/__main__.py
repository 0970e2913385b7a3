"""``python -m splitveil``."""

from splitveil.deploy.command import main

if __name__ == "__main__":
    raise SystemExit(main())
