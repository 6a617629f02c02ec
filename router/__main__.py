"""``python -m router``: the ``warmroute`` command."""

from router.cli.commands import main

if __name__ == "__main__":
    main()
