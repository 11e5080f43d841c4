"""Namespaces, roots and token ids from flags and files."""

from __future__ import annotations

import io
import json

import pytest

from kvstore.cli.parser import build_parser
from kvstore.cli.prompt import namespace_of, prompt_of, root_of, tokens_of
from kvstore.errors import ConfigError, InvalidArgumentError, InvalidTokensError
from kvstore.layer_groups import Recurrent, SlidingWindow
from kvstore.types import KvLayout, Namespace, Root

LAYOUT = "layers=2,kv_heads=1,head_dim=8,dtype=float32"
FLAGS = ["--model", "m", "--revision", "r", "--layout", LAYOUT]
TOML = """
model = "m"
revision = "r"
tenant = "team"
[layout]
layers = 2
kv_heads = 1
head_dim = 8
dtype = "float32"
[root]
salt = "pepper"
"""


def parsed(*argv):
    return build_parser().parse_args(["match", *argv])


def test_flags_alone_name_a_namespace():
    expected = Namespace(model="m", revision="r", layout=KvLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32"))
    assert expected == namespace_of(parsed(*FLAGS))


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "namespace.toml"
    file.write_text(TOML)
    arguments = parsed("--namespace", str(file), "--tenant", "other", "--layout", "layers=3", "--adapter", "a")

    namespace = namespace_of(arguments)

    assert ("m", "other", 3, 8) == (
        namespace.model,
        namespace.tenant,
        namespace.layout.layers,
        namespace.layout.head_dim,
    )
    assert Root(adapter="a", salt="pepper") == root_of(arguments)


def test_layer_groups_and_ranks_come_from_the_file(tmp_path):
    file = tmp_path / "namespace.toml"
    file.write_text(
        'model = "m"\nrevision = "r"\n[layout]\nranks = [1]\ntensor_parallel = 2\n'
        '[[layout.groups]]\nkind = "recurrent"\nlayers = 4\nstate_bytes = 64\nheads = 2\n'
        '[[layout.groups]]\nkind = "sliding_window"\nlayers = 3\nwindow = 128\nkv_heads = 2\nhead_dim = 8\n'
        'dtype = "int8"\n'
    )
    groups = (
        Recurrent(layers=4, state_bytes=64, heads=2),
        SlidingWindow(layers=3, window=128, kv_heads=2, head_dim=8, dtype="int8"),
    )
    layout = namespace_of(parsed("--namespace", str(file), *FLAGS)).layout
    assert (groups, (1,)) == (layout.groups, layout.ranks)


def test_a_json_file_says_the_same_as_a_toml_file(tmp_path):
    toml, jsons = tmp_path / "namespace.toml", tmp_path / "namespace.json"
    toml.write_text(TOML)
    layout = {"layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    values = {"model": "m", "revision": "r", "tenant": "team", "layout": layout, "root": {"salt": "pepper"}}
    jsons.write_text(json.dumps(values))

    first, second = parsed("--namespace", str(toml)), parsed("--namespace", str(jsons))

    assert namespace_of(first) == namespace_of(second)
    assert root_of(first) == root_of(second)


def test_the_secret_comes_from_its_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("abc\n")

    assert b"abc" == namespace_of(parsed(*FLAGS, "--secret-file", str(file))).secret
    with pytest.raises(ConfigError, match="secret file"):
        namespace_of(parsed(*FLAGS, "--secret-file", str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--revision", "r", "--layout", LAYOUT], "has no model"),
        (["--model", "m", "--layout", LAYOUT], "has no revision"),
        (["--model", "m", "--revision", "r"], "has no layers, kv_heads, head_dim, dtype"),
        (["--model", "m", "--revision", "r", "--layout", LAYOUT + ",colour=red"], "unknown layout field 'colour'"),
        (["--model", "m", "--revision", "r", "--layout", "layers"], "expected FIELD=VALUE"),
        (["--model", "m", "--revision", "r", "--layout", LAYOUT + ",rope=5"], "layout.rope is a int"),
    ],
)
def test_what_is_missing_or_unknown_is_named(argv, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        namespace_of(parsed(*argv))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("n.toml", "model = ", "namespace file"),
        ("n.json", "{", "namespace file"),
        ("n.json", "[1]", "no table"),
        ("n.toml", 'modle = "m"', "unknown namespace field 'modle'"),
        ("n.toml", "layout = 3", "expected a table"),
        ("n.toml", 'layout.groups = [{kind = "odd"}]', "kind 'odd', expected sliding_window or recurrent"),
        ("n.toml", "layout.groups = [3]", "kind None"),
        ("n.toml", "layout.groups = 3", "layout.groups is 3, expected a tuple"),
        ("n.toml", 'layout.groups = [{kind = "recurrent", layers = 2}]', "has no state_bytes"),
        ("n.toml", 'layout.groups = [{kind = "recurrent", colour = 2}]', "unknown recurrent field 'colour'"),
        ("n.toml", f"model = {'9' * 5000}", "namespace file"),
        ("n.json", "[" * 100_000, "namespace file"),
        ("n.json", '{"model": "m", "revision": "r", "secret_file": 3}', "secret_file is 3"),
        ("n.toml", 'model = "m"\nrevision = "r"\nsecret_file = "\\u0000"', "secret_file is"),
    ],
)
def test_a_wrong_namespace_file_is_named(tmp_path, name, text, expected):
    file = tmp_path / name
    file.write_text(text)

    with pytest.raises(InvalidArgumentError, match=expected):
        namespace_of(parsed("--namespace", str(file), *FLAGS))


def test_an_unknown_root_field_is_named(tmp_path):
    file = tmp_path / "n.toml"
    file.write_text('[root]\npepper = "x"\n')

    with pytest.raises(InvalidArgumentError, match="unknown root field 'pepper'"):
        root_of(parsed("--namespace", str(file)))


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3\n", "1,2,\n3"])
def test_token_files_are_read_in_each_form(tmp_path, monkeypatch, text):
    file = tmp_path / "tokens"
    file.write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))

    assert [1, 2, 3] == tokens_of(parsed("1", "2", "3"))
    assert [1, 2, 3] == tokens_of(parsed("--tokens-file", str(file)))
    assert [1, 2, 3] == tokens_of(parsed("--tokens-file", "-"))


@pytest.mark.parametrize("form", ["{0} {1}", '["{0}", "{1}"]', "{0},\n{1}\n"])
def test_digests_are_given_in_hexadecimal_digits(tmp_path, form):
    digests = [bytes(range(32)), bytes(31) + b"\1"]  # the second looks like a number
    file = tmp_path / "digests"
    file.write_text(form.format(digests[0].hex(), digests[1].hex().upper()))
    layout = "layers=1,kv_heads=1,head_dim=8,dtype=int8,block_tokens=4"
    namespace = ("--model", "m", "--revision", "r", "--layout")

    assert digests == tokens_of(parsed(*[digest.hex() for digest in digests]))
    arguments = parsed("--tokens-file", str(file), *namespace, layout + ",symbols=digests")
    assert digests == tokens_of(arguments)
    assert b"".join(digests) == prompt_of(arguments, namespace_of(arguments)).tobytes()
    with pytest.raises(InvalidTokensError, match="expected integers"):
        prompt_of(arguments, namespace_of(parsed(*namespace, layout)))
    with pytest.raises(InvalidTokensError, match="a digest is a int"):
        prompt_of(parsed("1", "2"), namespace_of(arguments))


def test_no_tokens_are_an_empty_prompt(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("[]")

    assert [] == tokens_of(parsed())
    assert [] == tokens_of(parsed("--tokens-file", str(file)))


@pytest.mark.parametrize("text", ["hello", "1.5", "1 two"])
def test_what_is_no_token_id_is_refused(tmp_path, text):
    file = tmp_path / "tokens"
    file.write_text(text)

    with pytest.raises(InvalidArgumentError, match="is no token id"):
        tokens_of(parsed("--tokens-file", str(file)))
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        tokens_of(parsed("--tokens-file", str(tmp_path / "none")))
    with pytest.raises(InvalidArgumentError, match="give one of them"):
        tokens_of(parsed("1", "--tokens-file", str(file)))
