"""Robustness of a classifier: the sets, the measurement on them, and the measures of the papers."""
