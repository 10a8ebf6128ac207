"""The best classifier from public weights, a user's images and few labels, with honest numbers.

Five ways to a classifier, the simplest first: class means and a linear probe on frozen features; training the head
alone, LoRA, or all layers; each from the public weights, and after pretraining on the user's images. The way is chosen
by stratified cross-validation on the training labels alone, all ways on the same folds: a later way replaces a simpler
one where it is better by more than one standard error of their difference over the images. The test images are used
once, at the end, for the chosen way and for the frozen start.
"""

from situs.measure.adapt.run import adapt_model
from situs.measure.adapt.ways import Adapted

__all__ = ["Adapted", "adapt_model"]
