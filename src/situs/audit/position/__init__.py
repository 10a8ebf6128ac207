"""What a model knows and gives away of position."""
