"""Whatever a user has on disk, as numbered samples: `open_source` looks at a path and picks the reader."""

from situs.data.sources.memory import addressed
from situs.data.sources.open import SAMPLES, judged_split, kind_of, open_source, splits_at

__all__ = ["SAMPLES", "addressed", "judged_split", "kind_of", "open_source", "splits_at"]
