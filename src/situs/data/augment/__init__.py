"""What happens to training images on the device: recipes, and the changes they are made of."""
