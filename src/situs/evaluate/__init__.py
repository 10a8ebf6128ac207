"""What a trained model can do: accuracy, ensembles, neighbours, positions, features. Each is a pure function."""
