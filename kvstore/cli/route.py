"""The proxy for OpenAI-compatible servers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvstore.cli.output import ExitCode
from kvstore.cli.prompt import namespace_of
from kvstore.cli.sidecar import client_files, sidecar_address
from kvstore.config import quiet_grpc
from kvstore.errors import ConfigError
from kvstore.insight_config import LogConfig
from kvstore.log_lines import log_to_stderr

if TYPE_CHECKING:
    import argparse


def route(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    quiet_grpc()
    from kvstore.route.run import RouteOptions, run

    host, colon, port = arguments.listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen is {arguments.listen!r:.80}, expected HOST:PORT")
    log_to_stderr(LogConfig())
    is_located = arguments.namespace is not None or arguments.model is not None
    options = RouteOptions(
        host=host.strip("[]"),
        port=int(port),
        upstreams=tuple(arguments.upstream),
        nodes=tuple(arguments.node),
        adapters=tuple(arguments.adapter_digest),
        tokenizer=arguments.tokenizer,
        address=sidecar_address(arguments),
        files=client_files(arguments),
        namespace=namespace_of(arguments) if is_located else None,
    )
    run(options, ready=sys.stdout)
    return ExitCode.DONE
