"""Verbs about sets of images, before a run reads them."""
