"""Where requests go, and when: filter, scorer, picker, admission. Decides from a `Fleet`."""
