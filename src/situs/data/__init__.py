"""Data: what a user has on disk, and the small set that travels with the package."""
