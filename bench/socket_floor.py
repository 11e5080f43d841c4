"""The floors of bench_transport.py: bare sockets that do what a lookup and a transfer do to them, and nothing else.

python bench/socket_floor.py PATH   listens on a Unix socket and on a TCP port, which it prints; a signal ends it

A connection begins with a letter and two numbers: `e` answers each request of the first number of bytes by the second
number of bytes; `s` sends the first number of bytes for each byte that comes; `r` takes them and answers with one byte.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading

HELLO = struct.Struct("<cQQ")


def serve(connected: socket.socket) -> None:
    """Do what the connection asks for until it ends."""
    with connected:
        kind, request_bytes, answer_bytes = HELLO.unpack(connected.recv(HELLO.size, socket.MSG_WAITALL))
        buffer = memoryview(bytearray(b"\1" * max(request_bytes, answer_bytes)))
        if kind == b"e":
            while connected.recv_into(buffer, request_bytes, socket.MSG_WAITALL):
                connected.sendall(buffer[:answer_bytes])
        elif kind == b"s":
            while connected.recv(1):
                connected.sendall(buffer)
        else:
            while receive_all(connected, buffer):
                connected.sendall(b"x")


def receive_all(connected: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer by plain recv_into; false at the end of the connection."""
    filled_bytes = 0
    while filled_bytes < buffer.nbytes:
        received_bytes = connected.recv_into(buffer[filled_bytes:])
        if not received_bytes:
            return False
        filled_bytes += received_bytes
    return True


def accept(listening: socket.socket) -> None:
    """Serve each connection in a thread of its own."""
    while True:
        connected, _ = listening.accept()
        threading.Thread(target=serve, args=(connected,), daemon=True).start()


def main() -> None:
    """Listen for good."""
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(sys.argv[1])
    unix.listen()
    tcp = socket.create_server(("127.0.0.1", 0))
    print(tcp.getsockname()[1], flush=True)
    threading.Thread(target=accept, args=(unix,), daemon=True).start()
    accept(tcp)


if __name__ == "__main__":
    main()
