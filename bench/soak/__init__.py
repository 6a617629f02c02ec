"""A fleet in trouble, for as long as is asked: is a request lost, is a byte wrong, does any grow?

`faults` is the seeded schedule of what happens to replicas, and `fleet` does it to their processes
(`simulator`). `front` has the router, or its picker and an Envoy; `reloads` rewrites
its configuration. `clients` ask in every manner that clients have, and check each byte of what
comes: a simulated replica's answer follows from its prompt. `ledger` counts how it ended, `watch`
reads memory and open files, and `verdict` says whether all that holds which must.

Called by its command line. Imports the simulator and the router's configuration.
"""
