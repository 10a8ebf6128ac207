"""Linear probes of frozen models: of places and of classes."""
