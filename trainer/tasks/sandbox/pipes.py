"""The two pipes to a confined child: reading and writing that cannot hang, whatever is at the other end.

Every wait has an end on the monotonic clock, tested on each turn (a child may drip one byte at a time); requests are
written without blocking (a child may not read); what comes in grows in a buffer up to a cap.
"""

import os
import select
import time
from dataclasses import dataclass, field

from sparkgrpo.trainer.tasks.sandbox.wire import MAX_BYTES

READ_BYTES = 1 << 16


class Failure(Exception):
    """Carries the reason code that ends a candidate."""


@dataclass(kw_only=True, slots=True)
class Child:
    """A confined process and our ends of its two pipes."""

    pid: int
    to_child: int
    from_child: int
    surplus: bytearray = field(default_factory=bytearray)
    """What came in behind the frame that was read."""

    def close(self) -> None:
        """Close our ends; harmless when called twice."""
        for descriptor in (self.to_child, self.from_child):
            if descriptor >= 0:
                os.close(descriptor)
        self.to_child = self.from_child = -1


def exchange(child: Child, request: bytes, end: float) -> bytes:
    """Write the request while reading one frame; its body. Raises Failure: timeout, crashed, too_much_output, and
    protocol_error for an answer to a request that was not read."""
    unsent, reply = memoryview(request), child.surplus
    poll = select.poll()
    poll.register(child.from_child, select.POLLIN)
    if unsent:
        poll.register(child.to_child, select.POLLOUT)
    while len(reply) < 4 or len(reply) < 4 + _frame_bytes(reply):
        for descriptor in _ready(poll, end):
            if descriptor == child.from_child:
                piece = os.read(descriptor, READ_BYTES)
                if not piece:
                    raise Failure("crashed")
                reply += piece
            else:
                unsent = _written(descriptor, unsent)
                if not unsent:
                    poll.unregister(descriptor)
    if unsent:
        raise Failure("protocol_error")
    size = 4 + _frame_bytes(reply)
    body = bytes(reply[4:size])
    del reply[:size]
    return body


def read_output(child: Child, request: bytes, end: float) -> bytes:
    """Write the request, close, and read until the child closes its end. Raises Failure: timeout, too_much_output."""
    unsent, printed = memoryview(request), child.surplus
    poll = select.poll()
    poll.register(child.from_child, select.POLLIN)
    poll.register(child.to_child, select.POLLOUT)
    while len(printed) <= MAX_BYTES:
        for descriptor in _ready(poll, end):
            if descriptor == child.from_child:
                piece = os.read(descriptor, READ_BYTES)
                if not piece:
                    return bytes(printed)
                printed += piece
            elif descriptor == child.to_child:
                try:
                    unsent = _written(descriptor, unsent)
                except Failure:  # it ended, or closed its input: what it printed counts all the same
                    unsent = memoryview(b"")
                if not unsent:
                    poll.unregister(descriptor)
                    os.close(descriptor)  # the end of its input
                    child.to_child = -1
    raise Failure("too_much_output")


def _frame_bytes(reply: bytearray) -> int:
    size = int.from_bytes(reply[:4], "big")
    if size > MAX_BYTES:
        raise Failure("too_much_output")
    return size


def _ready(poll: select.poll, end: float) -> list[int]:
    left_s = end - time.monotonic()
    events = poll.poll(left_s * 1000 + 1) if left_s > 0 else []
    if not events:
        raise Failure("timeout")
    return [descriptor for descriptor, _ in events]


def _written(descriptor: int, unsent: memoryview) -> memoryview:
    try:
        return unsent[os.write(descriptor, unsent) :]
    except BrokenPipeError:
        raise Failure("crashed") from None
