"""Crowds that ask for nothing: do the others' requests take longer, does memory stay bounded?

`kinds` has the crowds, and `hold` is the process that holds one against a router. `replica` is the
process of a replica that answers at once, or without end. `load` sends ordinary requests, `rounds`
times them with and without the crowd in turns, and `report` says what that shows.

Called by its command line. Imports the proof's statistics.
"""
