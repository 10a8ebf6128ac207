"""Augmentation on the device: recipes, and the operations they consist of."""
