"""Namespaces, roots and token ids as they are given on the command line."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.cli.token_words import token_of
from kvstore.config import read_secret
from kvstore.errors import InvalidLayoutError, InvalidNamespaceError, InvalidTokensError
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.tokens import as_prompt
from kvstore.types import KvLayout, Namespace, Root

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from kvstore.layer_groups import LayerGroup
    from kvstore.types import TokenArray

_NAMESPACE_FIELDS = ("model", "revision", "tenant", "secret_file", "layout", "root")
_GROUP_KINDS: dict[str, type[LayerGroup]] = {"sliding_window": SlidingWindow, "recurrent": Recurrent}


def namespace_of(arguments: argparse.Namespace) -> Namespace:
    """The namespace of the file and the flags; a flag overrides the file's field."""
    values = _file_values(arguments.namespace)
    for name in ("model", "revision", "tenant", "secret_file"):
        if getattr(arguments, name) is not None:
            values[name] = getattr(arguments, name)
    for name in ("model", "revision"):
        if name not in values:
            raise InvalidNamespaceError(f"the namespace has no {name}; give --{name} or --namespace FILE")
    secret_file = values.get("secret_file")
    if secret_file is not None and (not isinstance(secret_file, str) or "\0" in secret_file):
        raise InvalidNamespaceError(f"secret_file is {secret_file!r}, expected the path of a file")
    return Namespace(
        model=values["model"],
        revision=values["revision"],
        tenant=values.get("tenant", "default"),
        layout=_layout(_table(values, "layout"), arguments.layout),
        secret=None if secret_file is None else read_secret(Path(secret_file)),
    )


def root_of(arguments: argparse.Namespace) -> Root:
    """The root of the file and the flags; a flag overrides the file's field."""
    values = dict(_table(_file_values(arguments.namespace), "root"))
    known = [item.name for item in fields(Root)]
    for name in known:
        if getattr(arguments, name) is not None:
            values[name] = getattr(arguments, name)
    _refuse_unknown(values, known, "root", InvalidNamespaceError)
    return Root(**values)


def tokens_of(arguments: argparse.Namespace) -> list[int | bytes]:
    """The token ids, or digests, of the arguments, else of --tokens-file."""
    if arguments.tokens and arguments.tokens_file:
        raise InvalidTokensError("token ids are given as arguments and by --tokens-file; give one of them")
    if not arguments.tokens_file:
        return list(arguments.tokens)
    text = sys.stdin.read() if arguments.tokens_file == "-" else _read(arguments.tokens_file, InvalidTokensError)
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    try:
        return [token_of(word.removeprefix('"').removesuffix('"')) for word in words if word]
    except ValueError as error:
        raise InvalidTokensError(f"{arguments.tokens_file}: {error}") from None


def prompt_of(arguments: argparse.Namespace, namespace: Namespace) -> TokenArray:
    """What `namespace` compares of the prompt that the arguments give."""
    return as_prompt(namespace, tokens_of(arguments))


def _file_values(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    text = _read(file, InvalidNamespaceError)
    try:
        values = json.loads(text) if file.endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as err:  # also a number of thousands of digits, brackets thousands deep
        raise InvalidNamespaceError(f"namespace file {file}: {err}") from err
    if not isinstance(values, dict):
        raise InvalidNamespaceError(f"namespace file {file} is no table of fields")
    _refuse_unknown(values, _NAMESPACE_FIELDS, "namespace", InvalidNamespaceError)
    return values


def _table(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise InvalidNamespaceError(f"{name} of the namespace file is {table!r}, expected a table of fields")
    return table


def _layout(from_file: Mapping[str, Any], flag: str | None) -> KvLayout:
    values = {**from_file, **_layout_flag(flag)}
    kinds = {item.name: item.type for item in fields(KvLayout)}
    _refuse_unknown(values, tuple(kinds), "layout", InvalidLayoutError)
    missing = [name for name in ("layers", "kv_heads", "head_dim", "dtype") if name not in values]
    if missing:
        raise InvalidLayoutError(f"the layout has no {', '.join(missing)}; give --layout or --namespace FILE")
    for name in ("groups", "ranks"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if isinstance(values.get("groups"), tuple):
        values["groups"] = tuple(_layer_group(group) for group in values["groups"])
    return KvLayout(**values)


def _layer_group(values: object) -> LayerGroup:
    """A table `[[layout.groups]]`: its kind and the fields of that."""
    given = dict(values) if isinstance(values, dict) else {}
    kind = given.pop("kind", None)
    made_by = _GROUP_KINDS.get(kind) if isinstance(kind, str) else None
    if made_by is None:
        raise InvalidLayoutError(f"a group of the layout is of kind {kind!r}, expected {' or '.join(_GROUP_KINDS)}")
    declared = fields(made_by)
    _refuse_unknown(given, [item.name for item in declared], kind, InvalidLayoutError)
    missing = [item.name for item in declared if item.default is MISSING and item.name not in given]
    if missing:
        raise InvalidLayoutError(f"a {kind} group of the layout has no {', '.join(missing)}")
    return made_by(**given)


def _layout_flag(flag: str | None) -> dict[str, int | str]:
    values: dict[str, int | str] = {}
    for pair in (flag or "").split(","):
        name, equals, value = (text.strip() for text in pair.partition("="))
        if pair.strip() and not equals:
            raise InvalidLayoutError(f"--layout has {pair.strip()!r}, expected FIELD=VALUE")
        if equals:
            values[name] = int(value) if re.fullmatch(r"\d{1,18}", value, re.ASCII) else value
    return values


def _refuse_unknown(
    values: Mapping[str, Any],
    known: tuple[str, ...] | list[str],
    what: str,
    error: type[InvalidLayoutError] | type[InvalidNamespaceError],
) -> None:
    unknown = [name for name in values if name not in known]
    if unknown:
        raise error(f"unknown {what} field {unknown[0]!r}, expected one of {', '.join(known)}")


def _read(file: str, error: type[InvalidTokensError] | type[InvalidNamespaceError]) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as err:
        raise error(f"{file} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise error(f"{file} is not UTF-8 text (byte {err.start})") from err
