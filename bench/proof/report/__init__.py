"""What is told of the results: tables and plots for the README, bars met or not, lost requests.

Everything here is read from the files that `bench.proof.kept` has, and nothing is run.
"""
