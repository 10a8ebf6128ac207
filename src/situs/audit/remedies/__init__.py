"""Remedies: the weakest setting of each defence under which every attacker that knows it stays below a limit."""
