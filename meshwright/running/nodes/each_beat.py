"""What a supervisor does at each beat, beside everything else."""

import threading
from collections.abc import Callable


class EachBeat:
    """Calls a function at each beat, on a thread of its own."""

    def __init__(self, name: str, beat_s: float) -> None:
        self._name, self._beat_s = name, beat_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, look: Callable[[], None]) -> None:
        """Calls it from here on. Only the thread keeps it, and only until it ends: whoever `look`
        is of goes as soon as nobody else holds it, and with it the store of a meeting."""
        self._thread = threading.Thread(
            target=self._run, args=(look,), name=self._name, daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Calls it no more; waits for a call that is under way."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, look: Callable[[], None]) -> None:
        while not self._closed.wait(self._beat_s):
            look()
