"""The server of llama-cpp-python, whose models share prefixes: its own command line, and where the sidecar is.

    python -m kvstore.connectors.llama_cpp_server --kvstore unix:///run/kvstore.sock --model model.gguf --n_ctx 8192

Unless told otherwise the server keeps no logits of prompts (`--logits_all`), which log-probabilities need, and with
which each prompt is computed in full. The server loads models itself, also later, by name; each is cached as it is
loaded. A model that cannot be is served as without kvstore, after one log line that says why.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llama_cpp.server.__main__ import main as serve
from llama_cpp.server.model import LlamaProxy

from kvstore.config import read_secret
from kvstore.connectors.llama_cpp import Settings, UnsupportedModelError, cached
from kvstore.connectors.llama_cpp_cache import Limits
from kvstore.transport.client import connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_cpp import Llama
    from llama_cpp.server.settings import ModelSettings

    from kvstore.api import KvStore

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    """Take the arguments of kvstore, and let the server have the others."""
    parser = argparse.ArgumentParser(
        prog="python -m kvstore.connectors.llama_cpp_server",
        description="The server of llama-cpp-python over kvstore; all other arguments are those of llama_cpp.server.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--kvstore", metavar="ADDRESS", required=True, help="where the sidecar listens")
    parser.add_argument("--kvstore-tenant", metavar="NAME", default="default", help="whose states they are")
    parser.add_argument("--kvstore-secret-file", metavar="FILE", help="holds the secret of the namespace")
    parser.add_argument("--kvstore-token-file", metavar="FILE", help="holds a token for a sidecar that asks for one")
    parser.add_argument("--kvstore-tls-ca", metavar="FILE", help="certificates to trust, for tls:// addresses")
    parser.add_argument("--kvstore-lookup-seconds", metavar="N", type=float, default=Limits().lookup_seconds)
    parser.add_argument("--kvstore-load-seconds", metavar="N", type=float, default=Limits().load_seconds)
    known, others = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(others):
        parser.print_help()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    secret = read_secret(Path(known.kvstore_secret_file)) if known.kvstore_secret_file else None
    store = connect(
        known.kvstore,
        lookup_seconds=known.kvstore_lookup_seconds,
        bulk_seconds=known.kvstore_load_seconds,
        token_file=known.kvstore_token_file,
        tls_ca=known.kvstore_tls_ca,
    )
    limits = Limits(lookup_seconds=known.kvstore_lookup_seconds, load_seconds=known.kvstore_load_seconds)
    cache_loaded_models(store, Settings(tenant=known.kvstore_tenant, secret=secret, limits=limits))
    if not any(word.startswith(("--logits_all", "--config_file")) for word in others):
        others += ["--logits_all", "false"]  # what the engine's server has on, and no prefix can be reused with
    sys.argv[1:] = others
    serve()


def cache_loaded_models(store: KvStore, settings: Settings) -> None:
    """Have every model that the server loads from now on use `store`, which outlives them."""
    load = LlamaProxy.load_llama_from_model_settings

    def load_cached(model_settings: ModelSettings) -> Llama:
        llm = load(model_settings)
        try:
            return cached(llm, store, settings)
        except UnsupportedModelError as error:
            logger.warning("kvstore is off for a model: %s", error)
            return llm

    LlamaProxy.load_llama_from_model_settings = staticmethod(load_cached)


if __name__ == "__main__":
    main()
