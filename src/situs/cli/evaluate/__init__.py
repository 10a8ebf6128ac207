"""The verbs that measure: `situs evaluate …`, one file each, and `situs features`."""
