"""The reference pages in docs/, written from the code: `python -m tools.reference`.

The classes of the settings are the schema that files are read by; `sections` makes their fields
tables, with the docstring below each field as its meaning, and `pages` puts them together. A test
says that the pages are fresh.
"""
