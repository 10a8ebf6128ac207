"""Processes of their own: two ranks under torchrun, and Triton, for the tests that need real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from warm import warm

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


BUILD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def build(kernel, types, constants, **options):
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]
"""
"""`build(kernel, types, constants, **options)`: the code for a GPU that need not be here."""


def triton(code: str, **variables: str) -> str:
    """What the code prints under these variables, which Triton reads when it is imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


AGAIN = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
    del sys.modules[name]
"""
"""torch has imported Triton, whose functions would be compiled: they are made anew for the interpreter."""


def interpreted(code: str) -> str:
    """What the code prints in a warm process in which Triton interprets its kernels."""
    status, printed, complaints = warm("-c", AGAIN + code, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert status == 0, complaints
    return printed.strip()
