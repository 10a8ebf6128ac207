"""What a model has learned of position: its table, its features, its attention, and pictures of them."""
