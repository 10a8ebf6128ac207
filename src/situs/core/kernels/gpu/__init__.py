"""Triton and Gluon code, imported where a GPU runs it."""
