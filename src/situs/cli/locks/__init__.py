"""The verbs about keys and permutations: `key new`, `lock`, `unlock`, `verify`, one file each."""
