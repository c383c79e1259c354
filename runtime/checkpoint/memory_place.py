"""The memory of a node, as others write and read it: a line of JSON asks, one answers, then bytes.

Whoever starts the ranks of a node answers (`running/memory_server.py`). In each question is a
secret, which the nodes of a job tell each other through the store in which they met.
"""

import json
import socket
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_QUESTION = 2048
"""Bytes."""
LONGEST_LIST = 64 * 2**20
MOST_TEXT = 2**30
_CONNECT_S, _ANSWER_S = 5.0, 60.0
_lines = threading.local()
"""Connections of each thread, by place."""


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where a node's memory is to be reached."""

    node: int
    host: str
    port: int
    secret: str = field(repr=False)

    def dumps(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def held(self) -> Any:
        """What is there: of each `node_memory.KeptSave` its JSON. OSError if nobody answers."""
        return _line_to(self).asked({"what": "list"})["held"]

    def read_into(self, name: str, start: int, view: memoryview) -> int:
        """Fills `view` from byte `start` of a file on; how many bytes there were. OSError if nobody
        answers, or there is no such file."""
        line = _line_to(self)
        answer = line.asked({"what": "read", "name": name, "from": start, "bytes": len(view)})
        return line.received(view, int(answer["bytes"]))

    def read_text(self, name: str) -> str:
        """A text of which nobody knows the length. OSError as above."""
        line = _line_to(self)
        answer = line.asked({"what": "read", "name": name, "from": 0, "bytes": MOST_TEXT})
        buffer = bytearray(min(int(answer["bytes"]), MOST_TEXT))
        line.received(memoryview(buffer), int(answer["bytes"]))
        return buffer.decode("utf-8", "replace")

    def put(self, start: str, name: str, path: Path) -> None:
        """Writes a copy of the file `path` there, of ranks of that start. OSError says why it is
        not taken."""
        line = _line_to(self)
        with path.open("rb") as file:
            size = path.stat().st_size
            line.asked({"what": "put", "start": start, "name": name, "bytes": size})
            line.send(file)


class _Line:
    """A connection to one place, of one thread. After an error it is closed."""

    def __init__(self, place: MemoryPlace) -> None:
        self._place = place
        self._socket = socket.create_connection((place.host, place.port), _CONNECT_S)
        self._socket.settimeout(_ANSWER_S)
        self._file: BinaryIO = self._socket.makefile("rb")
        self.is_open = True

    def asked(self, question: dict[str, Any]) -> Any:
        """The answer to a question."""
        line = json.dumps({"secret": self._place.secret, **question}).encode() + b"\n"
        try:
            self._socket.sendall(line)
        except OSError:
            self.close()
            raise
        return self._answer()

    def send(self, content: BinaryIO) -> None:
        """All of a file, once it was asked whether it is taken."""
        try:
            self._socket.sendfile(content)
        except OSError:
            self.close()
            raise
        self._answer()

    def received(self, view: memoryview, count: int) -> int:
        """The bytes that follow an answer, into `view`; how many."""
        done = 0
        try:
            if not 0 <= count <= len(view):
                raise OSError(f"{count} bytes where {len(view)} were asked for")
            while done < count:
                got = self._file.readinto(view[done:count])  # type: ignore[attr-defined]
                if not got:
                    raise OSError(f"node {self._place.node} broke off")
                done += got
        except OSError:
            self.close()
            raise
        return done

    def _answer(self) -> Any:
        try:
            text = self._file.readline(LONGEST_LIST)
            if not text.endswith(b"\n"):
                raise OSError(f"the memory of node {self._place.node} does not answer")
            answer = json.loads(text)
            if "error" in answer:
                raise OSError(f"node {self._place.node}: {answer['error']}")
        except OSError:
            self.close()
            raise
        except ValueError as error:
            self.close()
            raise OSError(f"node {self._place.node} answers nonsense: {error}") from error
        return answer

    def close(self) -> None:
        """Nothing more is asked there."""
        self.is_open = False
        self._file.close()
        self._socket.close()

    def __del__(self) -> None:
        if self.__dict__.get("_file") is not None:  # its thread has ended
            self.close()


def _line_to(place: MemoryPlace) -> _Line:
    """This thread's connection to a place, or a new one."""
    known: dict[MemoryPlace, _Line] = _lines.__dict__.setdefault("known", {})
    if place not in known or not known[place].is_open:
        known[place] = _Line(place)
    return known[place]
