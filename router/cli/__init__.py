"""The ``warmroute`` command."""
