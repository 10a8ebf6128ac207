"""Operations on tokens, positions and permutations: torch only, pure functions."""
