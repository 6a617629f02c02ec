"""Replicas that take next to no time: ready answers, slow streams by a common clock.

`__main__` is their process. `answers` has what is said, `http` says it, `clock`
paces the streams, `telling` is what a replica needs whose tokens and keys a
router is to know.
"""
