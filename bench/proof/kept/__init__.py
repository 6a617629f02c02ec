"""What is kept of the proof: a file for each case, its records, and of which sources it is.

`bench.proof.__main__` writes them by `store`; `bench.proof.report` reads them by `result`.
"""
