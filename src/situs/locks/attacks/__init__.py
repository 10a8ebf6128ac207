"""Attacks on a lock by those who have no key, and what is left of it."""

from situs.locks.attacks.audit import LockAudit, LockAuditConfig, audit_lock

__all__ = ["LockAudit", "LockAuditConfig", "audit_lock"]
