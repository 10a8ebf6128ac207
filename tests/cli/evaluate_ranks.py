"""Several verbs one after the other on the ranks of torchrun: python evaluate_ranks.py FILE, a command line a line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from situs.cli.main import main
from situs.train import distributed

if __name__ == "__main__":
    kept = dict(os.environ)
    leave, distributed.stop = distributed.stop, lambda: None  # a group can be joined once in torchrun's life
    statuses = []
    for line in Path(sys.argv[1]).read_text().splitlines():
        statuses.append(main(line.split()))
        os.environ.update(kept)  # a verb for one rank alone forgets the others
    leave()
    sys.exit(max(statuses))
