"""The optimisation attacks: images whose gradients are those that were sent."""
