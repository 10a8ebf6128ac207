"""Detection: which objects are found where, beside those that are there."""
