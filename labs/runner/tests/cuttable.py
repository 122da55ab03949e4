"""A TCP proxy on this machine whose connections break on demand, the way a network does."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["down", "up"]
"""Down is from the target to the client."""

PIECE_BYTES = 1 << 16


def reserve_port() -> socket.socket:
    """A socket that keeps a port from everybody who does not ask for exactly it; nothing listens there yet."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _shut(connection: socket.socket) -> None:
    """Ends it at once and wakes whoever waits for it; its owner still closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class _Link:
    client: socket.socket
    target: socket.socket
    counted: dict[str, int] = field(default_factory=lambda: {"down": 0, "up": 0})
    """Bytes since the link began, or since a cut was last asked for."""
    is_dead: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        self.is_dead.set()
        _shut(self.client)
        _shut(self.target)


class CuttableProxy:
    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        # Held all the time, so that the port is still ours after a time of refusing.
        self._held = reserve_port()
        self.port: int = self._held.getsockname()[1]
        self.passed_bytes: dict[str, int] = {"down": 0, "up": 0}
        self.num_cuts = 0
        self._lock = threading.RLock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._cut_bytes, self._cut_direction, self._cuts_left = 0, "down", 0
        self._rate: float | None = None
        self._flows = threading.Event()
        self._flows.set()
        self._is_closed = False
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.refuse(False)

    def retarget(self, port: int) -> None:
        """For connections from now on."""
        self._target_port = port

    def cut(self) -> None:
        """Drops all live connections."""
        with self._lock:
            links = [link for link in self._links if not link.is_dead.is_set()]
            self.num_cuts += len(links)
            for link in links:
                link.end()

    def cut_after(self, num_bytes: int, direction: Direction = "down", times: int = 1) -> None:
        """Drops so many connections in succession, each once so many bytes of it were passed from now on."""
        with self._lock:
            self._cut_bytes, self._cut_direction, self._cuts_left = num_bytes, direction, times
            for link in self._links:
                link.counted = {"down": 0, "up": 0}

    def blackhole(self, on: bool) -> None:
        """Accepts and holds connections, and passes nothing; what came in meanwhile is passed afterwards."""
        if on:
            self._flows.clear()
        else:
            self._flows.set()

    def refuse(self, on: bool) -> None:
        """Refuses new connections; those that are live go on."""
        with self._lock:
            if on and self._listener is not None:
                _shut(self._listener)
                self._listener = None
                if self._acceptor is not None:
                    self._acceptor.join()
            elif not on and self._listener is None and not self._is_closed:
                listener = socket.socket()
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", self.port))
                listener.listen(64)
                self._listener = listener
                self._acceptor = threading.Thread(target=self._accept, args=(listener,), daemon=True)
                self._acceptor.start()

    def throttle(self, bytes_per_s: float | None) -> None:
        """The rate of each connection in each direction."""
        self._rate = bytes_per_s

    def close(self) -> None:
        self._is_closed = True
        self.refuse(True)
        with self._lock:
            for link in self._links:
                link.end()
        self._flows.set()
        for thread in list(self._threads):
            thread.join()
        self._held.close()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket() as target:
            link = _Link(client, target)
            with self._lock:
                self._links.add(link)
                if self._is_closed:
                    link.end()
            try:
                if self._waits_for_flow(link):
                    target.connect(("127.0.0.1", self._target_port))
                    if link.is_dead.is_set():  # cut while it was being made
                        return
                    up = threading.Thread(target=self._pump, args=(link, client, target, "up"), daemon=True)
                    up.start()
                    self._pump(link, target, client, "down")
                    up.join()
            except OSError:
                pass  # nothing listens there: the client sees its connection end
            finally:
                with self._lock:
                    self._links.discard(link)

    def _waits_for_flow(self, link: _Link) -> bool:
        while not self._flows.wait(0.02):
            if link.is_dead.is_set():
                return False
        return not link.is_dead.is_set()

    def _pump(self, link: _Link, source: socket.socket, sink: socket.socket, direction: Direction) -> None:
        try:
            while True:
                rate = self._rate
                data = source.recv(PIECE_BYTES if rate is None else max(1, min(PIECE_BYTES, int(rate / 20))))
                if not self._waits_for_flow(link):
                    return
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                data, is_last = self._until_cut(link, data, direction)
                sink.sendall(data)
                with self._lock:
                    self.passed_bytes[direction] += len(data)
                if is_last:
                    link.end()
                    return
                if rate is not None:
                    link.is_dead.wait(len(data) / rate)
        except OSError:
            link.end()

    def _until_cut(self, link: _Link, data: bytes, direction: Direction) -> tuple[bytes, bool]:
        """What of the data is still passed, and whether the link is to be cut behind it."""
        with self._lock:
            is_last = False
            if self._cuts_left and direction == self._cut_direction and not link.is_dead.is_set():
                room = max(0, self._cut_bytes - link.counted[direction])
                if len(data) >= room:
                    data, is_last = data[:room], True
                    link.is_dead.set()
                    self._cuts_left -= 1
                    self.num_cuts += 1
            link.counted[direction] += len(data)
            return data, is_last
