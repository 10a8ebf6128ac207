"""From public weights, own images and few labels to the best classifier that they give, with honest numbers.

Five ways to a classifier, from the simplest on: class means and a linear probe on frozen features, then the head alone,
LoRA and all layers, trained; each from the weights as they are, and after pretraining on the own images. Which one is
taken is decided by stratified cross-validation on the training labels alone, every way on the same folds: another takes
the place of a simpler one where it is better by more than one standard error of their difference, image by image. The
test images are looked at once, at the end, with what was chosen and with the frozen start beside it.
"""

from situs.measure.adapt.run import adapt_model
from situs.measure.adapt.ways import Adapted

__all__ = ["Adapted", "adapt_model"]
