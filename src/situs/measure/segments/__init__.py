"""Segmentation: the class of every pixel, whole images by windows or at once, and how right it is."""
