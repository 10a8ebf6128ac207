"""Linear probes of frozen models: of places, of classes and of masks."""
