"""Whether a limit is kept, what proves it, and the audit as files."""
