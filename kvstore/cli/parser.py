"""All commands and flags of `kvstore`, once. kvstore/README.md lists them too; tests/test_tidy.py compares."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

from kvstore import __version__
from kvstore.cli.token_words import token_of
from kvstore.config import DISK_ADMISSIONS, EVICTION_POLICIES
from kvstore.connectors.check import CHECKERS
from kvstore.security_config import ROLE_WORDS

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001  # argparse names it nowhere else

_EXIT_CODES = "exit codes: 0 done, 1 failed, 2 usage, 3 partly done"
# The named flags of `serve`, and the key of the setting that each gives.
SERVE_FLAGS = {
    "data_dir": "data_dir",
    "listen": "server.listen",
    "host_bytes": "tiers.host.capacity_bytes",
    "disk_bytes": "tiers.disk.capacity_bytes",
    "packed_bytes": "tiers.packed.capacity_bytes",
    "metrics": "server.metrics_address",
    "eviction_policy": "store.eviction_policy",
    "tls_cert": "tls.cert",
    "tls_key": "tls.key",
    "tls_client_ca": "tls.client_ca",
    "access_file": "auth.file",
    "cluster": "cluster.directory",
    "node": "cluster.node",
    "advertise": "cluster.advertise",
}

# Those of all commands that ask a sidecar.
CLIENT_FLAGS = {name: f"client.{name}" for name in ("tls_ca", "tls_cert", "tls_key", "token_file")}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Parsed arguments carry `handler` ("module:function") and `title`."""
    parser = argparse.ArgumentParser(prog="kvstore", description="Prefix-aware KV-cache tiering.", epilog=_EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_demo(commands)
    _add_looking(commands)
    _add_debug(commands)
    _add_changing(commands)
    _add_namespaces(commands)
    _add_replay(commands)
    _add_bench(commands)
    _add_route(commands)
    _add_check(commands)
    _add_config(commands)
    _add_dashboards(commands)
    _add_security(commands)
    return parser


def _add(commands: Commands, name: str, handler: str, sentence: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=sentence, description=sentence, epilog=_EXIT_CODES)
    command.set_defaults(handler=f"kvstore.cli.{handler}", title=command.prog)
    return command


def _add_serve(commands: Commands) -> None:
    serve = _add(commands, "serve", "processes:serve", "Run the sidecar in the foreground.")
    serve.add_argument("--config", metavar="FILE", help="settings in TOML")
    serve.add_argument("--data-dir", metavar="DIR", help="folder for everything that outlives the process")
    serve.add_argument(
        "--listen", metavar="ADDRESS[,ADDRESS]", help="unix:///path, host:port on loopback, or tls://host:port"
    )
    serve.add_argument("--host-bytes", metavar="SIZE", help="host memory for blocks, such as 64MiB")
    serve.add_argument("--disk-bytes", metavar="SIZE", help="disk space for blocks, such as 1GiB; 0: no disk tier")
    serve.add_argument("--packed-bytes", metavar="SIZE", help="memory for packed blocks, in the place of a disk")
    serve.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics for Prometheus here")
    serve.add_argument("--eviction-policy", metavar="NAME", help=", ".join(EVICTION_POLICIES))
    serve.add_argument("--tls-cert", metavar="FILE", help="the server's certificate (PEM)")
    serve.add_argument("--tls-key", metavar="FILE", help="its key")
    serve.add_argument("--tls-client-ca", metavar="FILE", help="the CA of client certificates")
    serve.add_argument("--access-file", metavar="FILE", help="who gets in: hashes of tokens, names of certificates")
    serve.add_argument("--cluster", metavar="URL", help="the directory that nodes share, such as valkey://host:6379")
    serve.add_argument("--node", metavar="NAME", help="what this node is called (default: kept in the data directory)")
    serve.add_argument("--advertise", metavar="ADDRESS[,ADDRESS]", help="where peers reach it (default: --listen)")
    _add_set(serve)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any setting by its full key; repeatable"
    )


def _add_demo(commands: Commands) -> None:
    demo = _add(commands, "demo", "processes:demo", "Two engines share one system prompt, on this machine.")
    demo.add_argument("--cache-dir", metavar="DIR", help="where the model is kept (default: the user's cache folder)")
    _add_json(demo)


def _add_looking(commands: Commands) -> None:
    _add_remote(commands, "status", "Say whether the sidecar serves, and its version.")
    stats = _add_remote(commands, "stats", "Occupancy and counters since the start of the sidecar.")
    stats.add_argument("--what-if", action="store_true", help="what other capacities would have found instead")
    match = _add_remote(commands, "match", "How much of a prompt is stored, and where. Changes no recency.")
    _add_prompt(match)
    _add_doctor(commands)
    top = _add_remote(commands, "top", "What the sidecar does now, live; q or Ctrl-C ends it.", "top")
    top.add_argument("--interval", metavar="DURATION", default="1s", help="between readings (default %(default)s)")
    top.add_argument("--once", action="store_true", help="one reading, as plain lines")
    top.add_argument("--metrics", metavar="HOST:PORT", help="the sidecar's metrics page, for calls and their p99")
    nodes = _add_remote(commands, "nodes", "The nodes of the cluster, this one marked, and those that left.", "nodes")
    nodes.add_argument("--watch", action="store_true", help="again every 2 s until interrupted")
    locate = _add_remote(commands, "locate", "How much of a prompt each node of the cluster holds.")
    _add_prompt(locate)
    verify = _add_remote(commands, "verify", "Check every invariant of the index; exit code 1 if one is broken.")
    verify.add_argument("--scrub", action="store_true", help="also read all blocks on disk, and drop what is wrong")
    verify.add_argument("--rate", metavar="SIZE", default="64MiB", help="bytes read per second (default %(default)s)")
    events = _add_remote(commands, "events", "What was stored and removed, oldest first.")
    events.add_argument("--after", metavar="SEQUENCE", type=int, default=0, help="only events after this one")
    events.add_argument("--limit", metavar="COUNT", type=int, default=1000, help="at most so many (default 1000)")
    events.add_argument("--follow", action="store_true", help="go on with new events until interrupted")


def _add_doctor(commands: Commands) -> None:
    doctor = _add_remote(commands, "doctor", "Why prompts were not found, and what would raise the hit rate.", "doctor")
    doctor.add_argument("log", metavar="LOG", nargs="?", help="JSONL of requests (default: ask the sidecar)")
    doctor.add_argument("--reset", action="store_true", help="have the sidecar count anew")
    prompts = doctor.add_mutually_exclusive_group()
    prompts.add_argument("--tokenizer", metavar="PATH", help="folder of the model's, for prompts that are text")
    prompts.add_argument("--tokens", action="store_true", help="take prompts of token ids alone")
    doctor.add_argument(
        "--block-tokens", metavar="COUNT", type=int, help="tokens of a block (default 16, of a trace 512)"
    )


def _add_debug(commands: Commands) -> None:
    debug = commands.add_parser("debug", help="For bug reports.", description="For bug reports.")
    parts = debug.add_subparsers(required=True, metavar="COMMAND")
    dump = _add(
        parts, "dump", "debug:dump", "One archive for a bug report, without prompts, salts, secrets or payloads."
    )
    dump.add_argument("file", metavar="FILE.tar.gz", help="must not be there yet")
    dump.add_argument("--metrics", metavar="HOST:PORT", help="the sidecar's metrics page, to be in it")
    dump.add_argument("--log", metavar="FILE", help="the sidecar's log, whose last lines are to be in it")
    dump.add_argument("--config", metavar="FILE", help="the sidecar's settings in TOML")
    _add_sidecar(dump)
    _add_json(dump)


def _add_changing(commands: Commands) -> None:
    pin = _add_remote(commands, "pin", "Protect the stored prefix of a prompt from eviction.")
    _add_prompt(pin)
    pin.add_argument("--ttl", metavar="DURATION", help="end the pin after this time, such as 12h (default: never)")
    unpin = _add_remote(commands, "unpin", "End a pin.")
    unpin.add_argument("pin_id", metavar="PIN_ID", type=int, help="the id that `kvstore pin` printed")
    evict = _add_remote(
        commands, "evict", "Drop a prompt's blocks, or all that a writer wrote, and all stored below, from every tier."
    )
    _add_prompt(evict)
    evict.add_argument("--writer", metavar="ID", help="drop what this engine wrote; `kvstore match --json` names it")
    evict.add_argument("--from-block", metavar="INDEX", type=int, default=0, help="keep the blocks before this one")
    clear = _add_remote(commands, "clear", "Drop all blocks of a namespace, pinned ones too, for good.")
    _add_namespace(clear)
    _add_remote(commands, "flush", "Wait until everything admitted to disk is there.")
    _add_drain(commands)


def _add_drain(commands: Commands) -> None:
    drain = _add_remote(
        commands, "drain", "Have a node take nothing more, and others take what is worth most there.", "nodes"
    )
    drain.add_argument("node", metavar="NODE", nargs="?", help="as `kvstore nodes` names it (default: the one asked)")
    drain.add_argument("--undo", action="store_true", help="have it take part again")
    drain.add_argument(
        "--seconds", metavar="DURATION", default="60s", help="how long it may take, such as 5m (default %(default)s)"
    )
    drain.add_argument(
        "--bytes", metavar="SIZE", default="4GiB", help="what is handed over at most (default %(default)s)"
    )
    drain.add_argument("--to", metavar="NODE,...", help="who is to take it (default: all that are ready)")


def _add_namespaces(commands: Commands) -> None:
    namespace = commands.add_parser("namespace", help="Whole namespaces.", description="Whole namespaces.")
    parts = namespace.add_subparsers(required=True, metavar="COMMAND")
    listing = _add(parts, "list", "namespaces:list_namespaces", "The namespaces of a node, and what they take up.")
    one = _add(parts, "show", "namespaces:show_namespace", "What a node has of one namespace.")
    delete = _add(
        parts,
        "delete",
        "namespaces:delete_namespace",
        "Drop all of a namespace for good, on all nodes of the cluster.",
    )
    for command in (one, delete):
        command.add_argument(
            "id", metavar="ID", nargs="?", help="as `kvstore namespace list` prints it (default: that of the flags)"
        )
        _add_namespace(command)
    delete.add_argument(
        "--seconds",
        metavar="DURATION",
        default="30s",
        help="how long to wait for the other living nodes (default %(default)s)",
    )
    for command in (listing, one, delete):
        _add_sidecar(command)
        _add_json(command)


def _add_replay(commands: Commands) -> None:
    replay = _add(commands, "replay", "replay:replay", "What a trace of requests would hit at given capacities.")
    replay.add_argument(
        "trace", metavar="TRACE", help="JSONL: a Mooncake trace, or what `kvstore events --json` printed"
    )
    replay.add_argument(
        "--capacity",
        metavar="SIZE,...",
        default="1%,2%,5%,10%,25%",
        help="host tier: percent of the trace's unique blocks, blocks, or bytes such as 64GiB (default %(default)s)",
    )
    replay.add_argument("--disk", metavar="SIZE", help="disk tier, given likewise (default: none)")
    replay.add_argument(
        "--admission",
        metavar="NAME,...",
        default="default",
        help=f"what is written to disk: {', '.join(DISK_ADMISSIONS)}, default: the store's (default: default)",
    )
    replay.add_argument(
        "--policies",
        metavar="NAME,...",
        default="default",
        help=f"{', '.join(EVICTION_POLICIES)}, default: the store's (default: default)",
    )
    replay.add_argument(
        "--warm", metavar="RATIO", type=float, default=0.5, help="share of the requests not counted (default 0.5)"
    )
    replay.add_argument("--expand", metavar="FROM:TO", help="cut blocks, such as 512:16 tokens")
    replay.add_argument("--block-tokens", metavar="COUNT", type=int, help="tokens of a block in the trace")
    replay.add_argument("--block-bytes", metavar="SIZE", help="bytes of a replayed block (default: as of an 8B model)")
    replay.add_argument("--speed", metavar="FACTOR", type=float, help="keep the trace's time, so much faster")
    replay.add_argument("--skip-bad-lines", action="store_true", help="count malformed lines instead of failing")
    replay.add_argument("--parquet", metavar="FILE", help="write the rows there too (extra `replay`)")
    replay.add_argument("--plot", metavar="FILE", help="hit rate over capacity as .png or .svg (extra `plot`)")
    _add_json(replay)


def _add_bench(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="Measure a running sidecar.", description="Measure a running sidecar.")
    parts = bench.add_subparsers(required=True, metavar="COMMAND")
    load = _add(parts, "load", "bench:load", "Lookups, loads and stores from many clients, and what they took.")
    _add_sidecar(load)
    load.add_argument("--clients", metavar="COUNT", type=int, default=4, help="clients, a thread each (default 4)")
    load.add_argument("--processes", metavar="COUNT", type=int, default=1, help="processes they share (default 1)")
    load.add_argument("--seconds", metavar="DURATION", default="10s", help="how long, such as 10m (default 10s)")
    load.add_argument("--seed", metavar="NUMBER", type=int, default=0, help="of the clients' dice (default 0)")
    load.add_argument(
        "--mix", metavar="NAME=SHARE,...", default="match=8,load=1,store=1", help="operations (default %(default)s)"
    )
    load.add_argument("--prompts", metavar="COUNT", type=int, default=64, help="prompts that are shared (default 64)")
    load.add_argument("--prompt-tokens", metavar="COUNT", type=int, default=2048, help="of each (default 2048)")
    load.add_argument("--block-tokens", metavar="COUNT", type=int, default=16, help="tokens of a block (default 16)")
    load.add_argument("--block-bytes", metavar="SIZE", default="32KiB", help="bytes of a block (default 32KiB)")
    load.add_argument("--metrics", metavar="HOST:PORT", help="the sidecar's metrics page, to watch its memory")
    load.add_argument("--pid", metavar="PID", type=int, help="the sidecar's process, to watch its memory and files")
    _add_json(load)


def _add_route(commands: Commands) -> None:
    route = _add(commands, "route", "route:route", "A proxy that sends prompts to the server that holds their prefix.")
    route.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:8000", help="(default %(default)s)")
    route.add_argument(
        "--upstream", metavar="NAME=URL", action="append", default=[], help="a server and its engine's name; repeatable"
    )
    route.add_argument(
        "--node", metavar="NAME=NODE", action="append", default=[], help="the node beside a server; repeatable"
    )
    route.add_argument(
        "--tokenizer", metavar="PATH", default="engine", help="folder of one, engine or none (default %(default)s)"
    )
    route.add_argument(
        "--adapter-digest", metavar="NAME=DIGEST", action="append", default=[], help="of a LoRA adapter; repeatable"
    )
    _add_namespace(route)
    _add_sidecar(route)


def _add_check(commands: Commands) -> None:
    check = _add(commands, "check", "check:check", "Whether an engine will work with kvstore; exit code 1 if not.")
    check.add_argument("engine", metavar="ENGINE", choices=sorted(CHECKERS), help=", ".join(sorted(CHECKERS)))
    check.add_argument("--model", metavar="PATH", help="folder or file of the model (default: a tiny one, made up)")
    check.add_argument("--block-tokens", metavar="COUNT", type=int, help="tokens of a block (default: as usual)")
    check.add_argument(
        "--engine-arguments", metavar="TEXT", default="", help="more of the engine's own, as '--dtype bfloat16' of vllm"
    )
    check.add_argument("--embedded", action="store_true", help="with a store in this process, without a sidecar")
    _add_sidecar(check)
    _add_json(check)


def _add_config(commands: Commands) -> None:
    config = commands.add_parser("config", help="Show or check settings.", description="Show or check settings.")
    parts = config.add_subparsers(required=True, metavar="COMMAND")
    show = _add(parts, "show", "settings:show", "Every setting in force, and where its value comes from.")
    show.add_argument("--config", metavar="FILE", help="settings in TOML")
    _add_set(show)
    _add_json(show)
    check = _add(parts, "check", "settings:check", "Say whether a settings file is right.")
    check.add_argument("file", metavar="FILE", help="settings in TOML")
    _add_json(check)


def _add_dashboards(commands: Commands) -> None:
    sentence = "Dashboards for Grafana and rules for Prometheus."
    dashboards = commands.add_parser("dashboards", help=sentence, description=sentence)
    parts = dashboards.add_subparsers(required=True, metavar="COMMAND")
    export = _add(parts, "export", "dashboards:export_command", "Write them, and how Grafana finds them, to a folder.")
    export.add_argument("folder", metavar="DIR", help="made if it is not there; files of the same names are replaced")
    _add_json(export)


def _add_security(commands: Commands) -> None:
    certs = _add(commands, "certs", "security:certs", "Make a development CA, and certificates of server and clients.")
    certs.add_argument("folder", metavar="DIR", help="what is there already stays as it is")
    certs.add_argument(
        "--host", metavar="NAME,...", default="localhost,127.0.0.1", help="hosts of the server (default: %(default)s)"
    )
    certs.add_argument("--client", metavar="NAME,...", default="client", help="clients (default: %(default)s)")
    certs.add_argument("--days", metavar="COUNT", type=int, default=365, help="validity (default: %(default)s)")
    _add_json(certs)
    token = commands.add_parser("token", help="Make tokens.", description="Make tokens.")
    parts = token.add_subparsers(required=True, metavar="COMMAND")
    new = _add(
        parts, "new", "security:new_token_command", "Make a token, and the entry for the access file that lets it in."
    )
    new.add_argument("--name", required=True, help="who will have it; for the log")
    new.add_argument("--tenant", required=True, help="whose namespaces it is for; *: every tenant's")
    new.add_argument("--role", required=True, choices=ROLE_WORDS, help="what it allows; each includes those before it")
    new.add_argument("--days", metavar="COUNT", type=int, help="how long it holds (default: until it is removed)")
    new.add_argument("--access-file", metavar="FILE", help="add the entry there (default: print it)")
    new.add_argument("--out", metavar="FILE", help="write the token there, for its owner alone (default: print it)")
    _add_json(new)


def _add_remote(commands: Commands, name: str, sentence: str, module: str = "remote") -> argparse.ArgumentParser:
    command = _add(commands, name, f"{module}:{name}", sentence)
    _add_sidecar(command)
    _add_json(command)
    return command


def _add_sidecar(command: argparse.ArgumentParser) -> None:
    command.add_argument("--address", help="the sidecar's address (default: the setting `address`)")
    for name, key in CLIENT_FLAGS.items():
        command.add_argument(f"--{name.replace('_', '-')}", metavar="FILE", help=f"(default: the setting `{key}`)")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON for machines")


def _add_prompt(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "tokens",
        metavar="TOKEN",
        type=token_of,
        nargs="*",
        help="token ids of the prompt, or its digests in hexadecimal digits",
    )
    command.add_argument(
        "--tokens-file", metavar="FILE", help="the same as a JSON list, or parted by spaces or commas; -: stdin"
    )
    _add_namespace(command)
    root = command.add_argument_group("root (overrides the file's [root])")
    root.add_argument("--adapter", metavar="DIGEST", help="adapter of the request")
    root.add_argument("--salt", help="cache salt of the request")
    root.add_argument("--weights-epoch", metavar="TEXT", help="weights epoch of the request")


def _add_namespace(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("namespace (flags override the file)")
    group.add_argument("--namespace", metavar="FILE", help="TOML or JSON: model, revision, tenant, [layout], [root]")
    group.add_argument("--model", help="model name")
    group.add_argument("--revision", help="fingerprint of the checkpoint")
    group.add_argument("--tenant", help="tenant (default: default)")
    group.add_argument("--secret-file", metavar="FILE", help="file with the namespace's secret")
    group.add_argument(
        "--layout", metavar="FIELD=VALUE,...", help="layers=32,kv_heads=8,head_dim=128,dtype=bfloat16,block_tokens=16"
    )
