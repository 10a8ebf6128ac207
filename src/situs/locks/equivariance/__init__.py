"""Whether a model obeys the two laws of permutation, measured on that very model."""

from situs.locks.equivariance.findings import Finding, Verdict, verify

__all__ = ["Finding", "Verdict", "verify"]
