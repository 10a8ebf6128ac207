"""The verbs that show what a model has learned: `situs analyze …` and `situs report`, one file each."""
