"""Ctrl-C inside of calls that only read."""

from __future__ import annotations

import os
import signal

import pytest

from autopar.runtime.launch.interrupt import interrupt_at_end


@pytest.mark.parametrize("times", [1, 2])
def test_a_call_inside_of_another_ends_with_it(times: int, capfd: pytest.CaptureFixture[str]) -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), interrupt_at_end("the exchange and its call"):
        with interrupt_at_end("its call"):
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            reached.append("inner")
        reached.append("outer")
    assert reached == (["inner", "outer"] if times == 1 else [])
    assert capfd.readouterr().err.count("interrupted once the exchange and its call has ended") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
