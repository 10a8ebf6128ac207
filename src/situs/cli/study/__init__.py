"""The verbs about tables and figures of papers: `study list`, `study run`, `study show`, one file each."""
