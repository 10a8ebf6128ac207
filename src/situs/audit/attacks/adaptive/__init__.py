"""The attack by one who knows MJP."""
