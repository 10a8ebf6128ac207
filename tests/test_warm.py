"""What stands for `subprocess` in the tests is a process like any other."""

from __future__ import annotations

import os
import signal

from warm import Warm, warm


def test_words_streams_variables_and_status() -> None:
    code = "import os, sys; print(sys.argv[1:], os.environ['WORD'], os.getpid()); sys.stderr.write('hm'); sys.exit(7)"
    with Warm("-c", code, "a", 3, env=os.environ | {"WORD": "said"}) as process:
        assert process.communicate() == (f"['a', '3'] said {process.pid}\n", "hm")
        assert process.wait() == 7
    status, _, complaints = warm("-c", "import sys; assert 'timm' in sys.modules; 1 / 0")
    assert status == 1 and complaints.endswith("ZeroDivisionError: division by zero\n")


def test_nothing_of_situs_is_there_before_it_is_imported() -> None:
    code = "import sys; print([name for name in sys.modules if name.startswith('situs')])"
    assert warm("-c", code) == (0, "[]\n", "")


def test_it_hears_signals() -> None:
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 5)):
        code = "try:\n print('here', flush=True); __import__('time').sleep(60)\nexcept KeyboardInterrupt: exit(5)"
        with Warm("-c", code) as process:
            assert process.stdout.readline() == "here\n" and process.poll() is None
            process.send_signal(number)
            assert process.wait() == status
