"""Measures whether a model obeys the two permutation laws."""

from situs.locks.equivariance.findings import Finding, Verification, verify

__all__ = ["Finding", "Verification", "verify"]
