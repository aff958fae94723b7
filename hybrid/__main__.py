"""`python -m hybrid`: the command `hybrid`."""

from hybrid.commands.main import main

if __name__ == "__main__":
    raise SystemExit(main())
