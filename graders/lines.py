"""Reads JSON lines from a pipe, each by a deadline."""

import json
import os
import select
import time


class LineReader:
    """Reads the JSON lines that arrive at a file descriptor.

    The buffer is this class's own: poll looks at the pipe alone, and would wait for a line that one
    of Python's file objects has already taken into its buffer."""

    def __init__(self, fd, most_bytes=float("inf")):
        self.fd, self.most_bytes, self.buffer = fd, most_bytes, bytearray()
        self.poll = select.poll()  # The function select() fails at descriptors from 1024 on.
        self.poll.register(fd, select.POLLIN)

    def read_chunk(self, seconds):
        """The next bytes, b"" at the end of the pipe. Raises TimeoutError."""
        if not self.poll.poll(max(0.0, seconds) * 1000):
            raise TimeoutError
        return os.read(self.fd, 1 << 16)

    def read(self, seconds):
        """The value of the next line.

        Raises TimeoutError after so many seconds, EOFError at the end of the pipe, and ValueError
        for a line that is not JSON or is longer than `most_bytes`."""
        deadline = time.monotonic() + seconds
        searched = 0  # bytes that are known to hold no end of a line
        while (end := self.buffer.find(b"\n", searched)) < 0:
            searched = len(self.buffer)
            chunk = self.read_chunk(deadline - time.monotonic())
            if not chunk:
                raise EOFError("the pipe ended before the line did")
            self.buffer += chunk
            if len(self.buffer) > self.most_bytes:
                raise ValueError("the line is too long")
        line = self.buffer[:end]
        del self.buffer[:end + 1]
        return json.loads(line)
