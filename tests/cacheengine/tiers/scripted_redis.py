"""A server that speaks RESP, and answers as a test says."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Answer = Callable[[list[bytes]], bytes | None]
"""From a command's words to the bytes to send; None closes the connection."""


class ScriptedRedis:
    """Listens on a port of its own; counts the connections that it took."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connected)
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with contextlib.suppress(OSError), connected, connected.makefile("rb") as stream:
            while True:
                line = stream.readline()
                if not line:
                    return
                words = []
                for _ in range(int(line[1:])):
                    size = int(stream.readline()[1:])
                    words.append(stream.read(size + 2)[:-2])
                answer = b"+PONG\r\n" if words[0] == b"PING" else self.answer(words)
                if answer is None:
                    connected.shutdown(socket.SHUT_RDWR)
                    return
                connected.sendall(answer)

    def drop_connections(self) -> None:
        """Close all connections, as a server that ends does."""
        for connected in self._open:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_connections()
        self._thread.join(10)


@contextlib.contextmanager
def scripted(answer: Answer) -> Iterator[ScriptedRedis]:
    server = ScriptedRedis(answer)
    try:
        yield server
    finally:
        server.close()
