"""A bare gRPC server of the sidecar's kind (grpc.aio on uvloop) whose one method answers with 16 bytes.

python bench/echo_server.py SOCKET   prints a line when it is ready; a signal ends it
"""

from __future__ import annotations

import sys

import grpc.aio
import uvloop

REPLY = bytes(16)


async def echo(_request: bytes, _context: grpc.aio.ServicerContext) -> bytes:
    """Answer at once."""
    return REPLY


async def serve(path: str) -> None:
    """Serve on a Unix socket for good."""
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Echo": method}),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
