"""`kvstore check ENGINE`: whether an engine will work with this store, before its server starts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import kvstore
from kvstore.cli.output import ExitCode, print_json
from kvstore.cli.sidecar import client_files, sidecar_address
from kvstore.connectors.check import CheckOptions, Finding, Verdict, check_engine
from kvstore.errors import KvstoreError

if TYPE_CHECKING:
    import argparse

    from kvstore.api import KvStore
    from kvstore.connectors.check import CheckReport

_EMBEDDED_HOST_BYTES = 256 << 20
_LOOKUP_SECONDS = 10.0


def check(arguments: argparse.Namespace) -> int:
    """Check the engine against the sidecar, or with --embedded against a store in this process."""
    options = CheckOptions(arguments.model, arguments.block_tokens, arguments.engine_arguments)
    with _open(arguments) as store:
        report = check_engine(arguments.engine, options, store, _store_finding(store, arguments))
    if arguments.json:
        findings = [asdict(finding) for finding in report.findings]
        print_json({"engine": report.engine, "works": report.works, "findings": findings})
    else:
        _print_report(report)
    return ExitCode.DONE if report.works else ExitCode.FAILED


def _open(arguments: argparse.Namespace) -> KvStore:
    if arguments.embedded:
        return kvstore.open(None, host_bytes=_EMBEDDED_HOST_BYTES)
    return kvstore.connect(sidecar_address(arguments), lookup_seconds=_LOOKUP_SECONDS, **client_files(arguments))


def _store_finding(store: KvStore, arguments: argparse.Namespace) -> Finding:
    if arguments.embedded:
        return Finding("store", Verdict.OK, "embedded in this process, for this check alone")
    address = sidecar_address(arguments)
    try:
        store.stats()
    except KvstoreError as error:
        sentence = f"{address}: {error}; start one with `kvstore serve`, or try the engine alone with --embedded"
        return Finding("store", Verdict.FAILED, sentence)
    return Finding("store", Verdict.OK, f"the sidecar at {address} answers")


def _print_report(report: CheckReport) -> None:
    width = max(len(finding.subject) for finding in report.findings)
    for finding in report.findings:
        print(f"{finding.verdict.value:<7}  {finding.subject:<{width}}  {finding.sentence}")
    print(f"{report.engine}: {'works' if report.works else 'will not work'} with kvstore here")
