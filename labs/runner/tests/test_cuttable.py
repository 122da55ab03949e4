"""The proxy whose connections break on demand breaks them as it is told, and heals."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from cuttable import CuttableProxy


@pytest.fixture
def source() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def proxy(source: socket.socket) -> Iterator[CuttableProxy]:
    """Before a server that sends 1000 bytes and then what it gets."""

    def serve() -> None:
        while True:
            try:
                connection, _ = source.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection:
            try:
                connection.sendall(b"x" * 1000)
                while data := connection.recv(4096):
                    connection.sendall(data)
            except OSError:
                pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    proxy = CuttableProxy(source.getsockname()[1])
    yield proxy
    proxy.close()
    source.shutdown(socket.SHUT_RDWR)
    thread.join()


def connected(proxy: CuttableProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def received(connection: socket.socket, num_bytes: int) -> int:
    """So many bytes came, until as many as that or the end."""
    num = 0
    while num < num_bytes and (data := connection.recv(num_bytes - num)):
        num += len(data)
    return num


def test_a_cut_comes_after_so_many_bytes_of_so_many_connections(proxy: CuttableProxy) -> None:
    proxy.cut_after(300, times=2)
    nums = []
    for _ in range(3):
        with connected(proxy) as connection:
            nums.append(received(connection, 1000))
    assert nums == [300, 300, 1000]
    assert proxy.num_cuts == 2
    proxy.cut_after(10, "up")
    with connected(proxy) as connection:
        connection.sendall(b"y" * 50)
        assert received(connection, 2000) <= 1010
    assert proxy.passed_bytes["up"] == 10


def test_a_proxy_breaks_and_heals(proxy: CuttableProxy) -> None:
    with connected(proxy) as connection:
        assert received(connection, 1000) == 1000
        proxy.cut()
        assert connection.recv(1) == b""
    proxy.refuse(True)
    with pytest.raises(ConnectionRefusedError):
        connected(proxy)
    proxy.refuse(False)
    proxy.blackhole(True)
    with connected(proxy) as connection:
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.blackhole(False)
        connection.settimeout(5)
        assert received(connection, 1000) == 1000
    proxy.throttle(5000)
    with connected(proxy) as connection:
        began = time.monotonic()
        assert received(connection, 1000) == 1000
        assert time.monotonic() - began > 0.1
