"""Whether a model obeys the two laws of permutation, measured on that very model."""

from situs.locks.equivariance.findings import Finding, Verification, verify

__all__ = ["Finding", "Verification", "verify"]
