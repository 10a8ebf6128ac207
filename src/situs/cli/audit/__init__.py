"""The verbs that attack: `situs audit …`, one file each."""
