"""Permutation equivariance as a tool: verify it, lock a model with a key, and attack the lock."""
