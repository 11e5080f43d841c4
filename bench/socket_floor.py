"""The floors of bench_transport.py: bare sockets that do what a lookup and a transfer do to them, and nothing else.

python bench/socket_floor.py PATH CERT KEY   listens on a Unix socket, a TCP port and a TCP port of TLS, and prints both
ports; a signal ends it

A connection begins with a letter and two numbers: `e` answers each request of the first number of bytes by the second
number of bytes; `s` sends the first number of bytes for each byte that comes; `r` takes them and answers with one byte.
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import threading

HELLO = struct.Struct("<cQQ")


def serve(connected: socket.socket) -> None:
    """Do what the connection asks for until it ends."""
    with connected:
        raw = bytearray(HELLO.size)
        receive_all(connected, memoryview(raw))
        kind, request_bytes, answer_bytes = HELLO.unpack(raw)
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


def accept_tls(listening: socket.socket, context: ssl.SSLContext) -> None:
    """Serve each connection in a thread of its own, encrypted by the standard library."""
    while True:
        connected, _ = listening.accept()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tls = context.wrap_socket(connected, server_side=True)
        threading.Thread(target=serve, args=(tls,), daemon=True).start()


def main() -> None:
    """Listen for good."""
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(sys.argv[1])
    unix.listen()
    tcp = socket.create_server(("127.0.0.1", 0))
    tls = socket.create_server(("127.0.0.1", 0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(sys.argv[2], sys.argv[3])
    print(tcp.getsockname()[1], tls.getsockname()[1], flush=True)
    threading.Thread(target=accept, args=(unix,), daemon=True).start()
    threading.Thread(target=accept_tls, args=(tls, context), daemon=True).start()
    accept(tcp)


if __name__ == "__main__":
    main()
