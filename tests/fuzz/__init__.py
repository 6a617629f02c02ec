"""Every port that takes bytes gets wrong ones: no 500, no hang, no crash, no traceback.

``pytest tests/fuzz`` sends some hundred requests to each; with ``--hypothesis-profile=long`` it
sends thousands. Servers are processes of their own, as an operator runs them, and what they have
logged is read at the end.
"""
