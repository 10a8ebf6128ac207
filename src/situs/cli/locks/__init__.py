"""The verbs about keys and permutations: `key new`, `lock`, `unlock`, `verify`, `study lock`, one file each."""
