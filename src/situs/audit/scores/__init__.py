"""Scores: how close recovered images are to the originals."""
