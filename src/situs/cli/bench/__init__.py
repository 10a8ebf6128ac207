"""The verbs that say what a step costs: `situs bench …`, one file each."""
