"""The patch-embedding attack: linear systems whose solution is the pixels, and the bytes they are."""
