"""Asking a run to stop: Ctrl-C and SIGTERM set a flag that the run reads between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopFlag:
    """False until a signal asked the run to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def __bool__(self) -> bool:
        return self.is_set


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """SIGINT and SIGTERM set the flag: the step in hand is finished and saved. A second one interrupts at once."""
    flag = StopFlag()

    def ask(signum: int, frame: object) -> None:
        if flag.is_set:
            raise KeyboardInterrupt
        flag.is_set = True

    # Python allows handlers in the main thread alone; elsewhere (a notebook's worker) signals stay as they are.
    is_main = threading.current_thread() is threading.main_thread()
    previous = {signum: signal.signal(signum, ask) for signum in ((signal.SIGINT, signal.SIGTERM) if is_main else ())}
    try:
        yield flag
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
