"""Gives the memory of a node to the others: they write copies of their newest state, and read.

A question is a line of JSON (`runtime/checkpoint/memory_place.py`). Nothing is done for anybody who
does not know the secret; names are those of a checkpoint's files, directly in the node's folder;
what is written goes into a save that ranks of the same start have begun here.
"""

import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint.files import opened
from meshwright.runtime.checkpoint.memory_place import LONGEST_QUESTION, MemoryPlace
from meshwright.runtime.checkpoint.node_memory import free_bytes, held, is_part

_STRANGERS, _STRANGE_S = 256, 10.0
"""Connections at a time that have not said the secret, and how long one may be silent."""
_SILENT_S = 120.0
"""Of one that has."""
_CHUNK = 2**20


class MemoryServer:
    """Of one folder; inside `with` it answers, on threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._secret = secrets.token_hex(16)
        self._start = ""
        self._server = _Server(self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="memory", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def place(self, node: int, host: str) -> MemoryPlace:
        """Where others reach it; `host` is what they call this machine."""
        return MemoryPlace(node, host, self._server.server_address[1], self._secret)

    def accept(self, start: str) -> None:
        """Takes files of ranks of this start from here on, and of no other."""
        self._start = start

    def question(self, line: bytes) -> dict[str, Any]:
        """What a line asks; PermissionError or ValueError unless it says the secret."""
        question = json.loads(line)
        if not isinstance(question, dict):
            raise PermissionError("this is no question")
        said = str(question.get("secret")).encode("utf-8", "replace")
        if not hmac.compare_digest(said, self._secret.encode()):
            raise PermissionError("who asks does not know the secret")
        return question

    def answer(self, question: dict[str, Any], into: BufferedIOBase, out: BufferedIOBase) -> None:
        """One question; OSError or PlanError says why not."""
        match question.get("what"):
            case "list":
                _say(out, {"held": [one.dumps() for one in held(self._folder)]})
            case "read":
                self._read(question, out)
            case "put":
                self._put(question, into, out)
            case other:
                raise PermissionError(f"nobody may {str(other)[:20]!r} here")

    def _path(self, question: dict[str, Any], *, partial: bool) -> Path:
        """Of a part in this folder."""
        step, _, name = str(question.get("name")).partition("/")
        whole = step.removesuffix(".partial")
        if folders.step_of(Path(whole)) < 0 or not is_part(name) or (whole != step) != partial:
            raise PermissionError(f"{step[:40]}/{name[:40]} is no file that is given or taken here")
        return self._folder / step / name

    def _read(self, question: dict[str, Any], out: BufferedIOBase) -> None:
        path = self._path(question, partial=False)
        start, most = _number(question, "from"), _number(question, "bytes")
        with opened(path) as file:
            left = min(most, max(0, os.fstat(file.fileno()).st_size - start))
            _say(out, {"bytes": left})
            file.seek(start)
            _copy(file, out, left)

    def _put(self, question: dict[str, Any], into: BufferedIOBase, out: BufferedIOBase) -> None:
        path, left = self._path(question, partial=True), _number(question, "bytes")
        if not self._start or question.get("start") != self._start:
            raise PermissionError("these are files of another start of the job")
        if path.parent.is_symlink() or left > free_bytes(self._folder):
            raise OSError(f"there is no room for {left} bytes")
        with path.open("xb") as file:
            _say(out, {})
            _copy(into, file, left)
        _say(out, {})


def _copy(source: BinaryIO | BufferedIOBase, to: BinaryIO | BufferedIOBase, left: int) -> None:
    """So many bytes; ConnectionError if there are fewer."""
    while left > 0:
        chunk = source.read(min(left, _CHUNK))
        if not chunk:
            raise ConnectionError("it broke off")
        to.write(chunk)
        left -= len(chunk)


def _number(question: dict[str, Any], key: str) -> int:
    value = question.get(key)
    if type(value) is not int or not 0 <= value < 2**60:
        raise PermissionError(f"{key} is no number of bytes")
    return value


def _say(out: BufferedIOBase, answer: Any) -> None:
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: MemoryServer) -> None:
        both = socket.has_dualstack_ipv6()
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.server_address = self.socket.getsockname()
        self.owner = owner
        self.strangers = threading.BoundedSemaphore(_STRANGERS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the other side's matter."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _STRANGE_S
    wbufsize = _CHUNK
    server: _Server

    def handle(self) -> None:
        """Answers until the other side goes, or asks for what it may not have."""
        if not self.server.strangers.acquire(blocking=False):
            return
        try:
            question = self._question()
        finally:
            self.server.strangers.release()
        self.connection.settimeout(_SILENT_S)
        while question is not None and self._answers(question):
            question = self._question()

    def _question(self) -> dict[str, Any] | None:
        """The next one of somebody who knows the secret; None: there is none."""
        try:
            line = self.rfile.readline(LONGEST_QUESTION)
            return self.server.owner.question(line) if line else None
        except (OSError, ValueError, RecursionError) as error:
            self._refuse(error)
            return None

    def _answers(self, question: dict[str, Any]) -> bool:
        """Whether it was answered, to the end."""
        try:
            self.server.owner.answer(question, self.rfile, self.wfile)
            self.wfile.flush()
        except ConnectionError:  # in the middle of a file: what is said now would be a part of it
            return False
        except (OSError, PlanError, ValueError) as error:
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: Exception) -> None:
        with suppress(OSError):
            _say(self.wfile, {"error": str(error)[:500]})
