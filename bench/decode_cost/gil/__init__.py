"""For how long what is done with one chunk holds the interpreter's lock (GIL).

`chunk_work` is what is done, `spinner` how it is measured. Imports tiers and transfer.
"""
