"""A node's memory is given to who knows the secret, a part of a checkpoint at a time."""

import json
import socket
import time
from contextlib import contextmanager, suppress

import pytest

from meshwright.running import memory_server
from meshwright.running.memory_server import MemoryServer

PART, OTHER = "part-00000.safetensors", "part-00001.safetensors"
WAIT_S = 30.0


@pytest.fixture
def server(tmp_path):
    for step in ("step-00000001", "step-00000002.partial"):
        (tmp_path / "memory" / step).mkdir(parents=True)
    (tmp_path / "memory/step-00000001" / PART).write_bytes(b"0123456789")
    (tmp_path / "secret").write_text("of somebody else")
    with MemoryServer(tmp_path / "memory") as found:
        found.accept("now")
        yield found


@contextmanager
def _line(server):
    place = server.place(0, "127.0.0.1")
    with socket.create_connection((place.host, place.port), WAIT_S) as line:
        with line.makefile("rb") as answers:
            yield line, answers


def _ask(server, secret=None, body=b"", **question):
    """What is answered to one question, all of it; nothing where the connection is refused."""
    own = server.place(0, "127.0.0.1").secret
    text = json.dumps({"secret": own if secret is None else secret, **question}).encode()
    with suppress(ConnectionError), _line(server) as (line, answers):
        line.sendall(text + b"\n" + body)
        with suppress(OSError):  # it is refused already
            line.shutdown(socket.SHUT_WR)
        return answers.read()
    return b""


def _until(happened):
    until = time.monotonic() + WAIT_S
    while not happened() and time.monotonic() < until:
        time.sleep(0.01)
    assert happened()


def test_parts_are_given_and_taken(server, tmp_path):
    name = f"step-00000001/{PART}"
    given = _ask(server, what="read", name=name, **{"from": 3, "bytes": 4})
    assert given == b'{"bytes": 4}\n3456'
    assert _ask(server, what="read", name=name, **{"from": 8, "bytes": 9}).endswith(b"\n89")
    assert _ask(server, what="read", name=name, **{"from": 99, "bytes": 9}) == b'{"bytes": 0}\n'
    assert _ask(server, what="list") == b'{"held": []}\n', "nobody says of which save it is"
    put = {"what": "put", "start": "now", "name": f"step-00000002.partial/{OTHER}", "bytes": 5}
    assert _ask(server, body=b"abcde", **put) == b"{}\n{}\n"
    assert (tmp_path / "memory" / put["name"]).read_bytes() == b"abcde"
    assert b"exists" in _ask(server, body=b"fghij", **put)
    half = put | {"name": f"step-00000002.partial/{PART}"}
    assert _ask(server, body=b"abc", **half) == b"{}\n", "it is not said to be there"


WHOLE = {"name": f"step-00000001/{PART}", "from": 0, "bytes": 10}
PUT = {"what": "put", "start": "now", "name": f"step-00000002.partial/{OTHER}", "bytes": 1}


REFUSED = [
    ({"what": "read", "secret": "", **WHOLE}, "the secret"),
    ({"what": "list", "secret": "é"}, "the secret"),
    ({"what": "list", "secret": "\ud800"}, "the secret"),
    ({"what": "list", "secret": 5}, "the secret"),
    ({"what": "remove", **WHOLE}, "nobody may 'remove' here"),
    ({"what": ["list"]}, "nobody may"),
    ({"what": "read", **WHOLE, "bytes": -1}, "bytes is no number"),
    ({"what": "read", **WHOLE, "from": True}, "from is no number"),
    ({"what": "read", **WHOLE, "bytes": 10**18 * 2}, "bytes is no number"),
    ({"what": "read", **WHOLE, "name": f"step-00000003/{PART}"}, "is missing"),
    ({"what": "read", **WHOLE, "name": f"step-00000002.partial/{PART}"}, "is no file"),
    ({"what": "read", **WHOLE, "name": f"step-1/{PART}"}, "is no file"),
    ({"what": "read", **WHOLE, "name": f"../memory/step-00000001/{PART}"}, "is no file"),
    ({"what": "read", **WHOLE, "name": "step-00000001/../../secret"}, "is no file"),
    ({"what": "read", **WHOLE, "name": "step-00000001/latest"}, "is no file"),
    ({"what": "read", **WHOLE, "name": f"step-00000001/{PART}\n"}, "is no file"),
    ({**PUT, "name": f"step-00000001/{OTHER}"}, "is no file"),
    ({**PUT, "name": f"step-00000002.partial.partial/{OTHER}"}, "is no file"),
    ({**PUT, "name": "step-00000002.partial/written-by-meshwright"}, "is no file"),
    ({**PUT, "start": "before"}, "another start"),
    ({**PUT, "bytes": 2**59}, "no room"),
]  # fmt: skip


def test_anything_else_is_refused(server, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    for question, why in REFUSED:
        answer = _ask(server, body=b"x", **question)
        assert answer.count(b"\n") == 1 and why in json.loads(answer)["error"], question
    assert sorted(tmp_path.rglob("*")) == before
    for text in (b"[]\n", b"{\n", b"\xff\n", b"[" * 2000 + b"\n", b"1" * 3000):
        with _line(server) as (line, answers):
            line.sendall(text)
            assert b'"error"' in answers.readline(), text


def test_nothing_is_taken_before_ranks_are_started(tmp_path):
    (tmp_path / "step-00000002.partial").mkdir()
    with MemoryServer(tmp_path) as server:
        assert b"another start" in _ask(server, body=b"x", **{**PUT, "start": ""})


def test_a_link_is_no_part(server, tmp_path):
    (tmp_path / "memory/step-00000001" / OTHER).symlink_to(tmp_path / "secret")
    (tmp_path / "memory/step-00000004.partial").symlink_to(tmp_path)
    question = {**WHOLE, "what": "read", "name": f"step-00000001/{OTHER}"}
    assert b"it is a link" in _ask(server, **question)
    assert b"no room" in _ask(
        server, body=b"x", **{**PUT, "name": f"step-00000004.partial/{OTHER}"}
    )
    assert not (tmp_path / OTHER).exists()


def test_strangers_keep_nobody_out_who_knows_the_secret(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_server, "_STRANGERS", 1)
    with MemoryServer(tmp_path) as server, _line(server) as (line, answers):
        question = json.dumps({"secret": server.place(0, "").secret, "what": "list"}).encode()
        line.sendall(question + b"\n")
        assert answers.readline() == b'{"held": []}\n'
        with _line(server) as (stranger, _):
            stranger.sendall(b"{")
            _until(lambda: server._server.strangers._value == 0)
            assert _ask(server, what="list") == b"", "one stranger is there"
            line.sendall(question + b"\n")
            assert answers.readline() == b'{"held": []}\n'
        _until(lambda: _ask(server, what="list") == b'{"held": []}\n')


def test_a_stranger_who_says_nothing_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_server._Handler, "timeout", 0.05)
    with MemoryServer(tmp_path) as server, _line(server) as (_, answers):
        assert b"timed out" in answers.read()
