"""Sweeps: what comes back over the strength of a defence, and the weakest setting that a gate passes."""
