"""Two ranks under torchrun, for the tests that need real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun(*words: object, timeout: float = 120) -> tuple[str, str]:
    """What two gloo ranks print and complain of; they must end well, and no rank outlives the call."""
    with subprocess.Popen(
        [sys.executable, *TORCHRUN, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    ) as process:
        try:
            printed, complaints = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too, which outlive torchrun
            raise
    assert process.returncode == 0, printed + complaints
    return printed, complaints
