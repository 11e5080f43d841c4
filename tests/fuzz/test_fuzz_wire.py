"""The fast lane's decoders take any bytes: what is refused is refused by name, what is taken is within its limits."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidArgumentError, InvalidTokensError, KvstoreError, NoSpaceError, UnavailableError
from kvstore.tokens import PROMPT_TOKENS_MAX
from kvstore.transport import wire, wire_control, wire_link
from kvstore.transport.convert import root_from_bytes
from kvstore.transport.lookup_frames import read_lookup
from kvstore.transport.wire_prompts import PROMPTS_MAX, PromptBudget, PromptMemory, prompt_digest
from kvstore.v1 import block_pb2
from kvstore.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from conftest import Fuzz, Mutator

FRAMES = [
    bytes.fromhex(text)
    for text in json.loads((Path(__file__).parent.parent / "golden" / "wire_frames.json").read_text()).values()
]
FRAMES += [
    wire.encode_error(NoSpaceError("the host tier is full"), call_id=7),
    wire.encode_failure(grpc.StatusCode.INTERNAL, "the call failed", call_id=2**32 - 1),
]
BODY_BYTES_MAX = 1 << 20
SESSION_BYTES = 4096
PROMPT = bytes(range(256)) * 2
DELTAS_AT_ONCE = 20


def test_a_hello_is_one_or_is_refused(fuzz: Fuzz) -> None:
    def target(raw: bytes) -> None:
        with suppress(wire.WireFormatError):
            hello = wire.decode_client_hello(raw)
            verdict = wire.answer_hello(hello)
            answer = wire.decode_server_hello(wire.encode_server_hello(verdict, hello, 4096))
            assert (verdict is wire.Verdict.OK) == (answer.lowest <= answer.version <= answer.highest)
        with suppress(wire.WireFormatError):
            wire.decode_server_hello(raw)

    fuzz.run(10_000, lambda mutator: mutator.mutated(FRAMES[:4]), target)


def test_a_stream_of_frames_is_read_to_its_first_fault(fuzz: Fuzz) -> None:
    def target(raw: bytes) -> None:
        with suppress(wire.WireFormatError):
            at = 0
            while at + wire.HEADER_BYTES <= len(raw):
                header = wire.decode_header(raw, at, BODY_BYTES_MAX)
                at += wire.HEADER_BYTES
                assert header.body_bytes <= BODY_BYTES_MAX
                read_frame(header, raw[at : at + header.body_bytes])
                at += header.body_bytes

    def make(mutator: Mutator) -> bytes:
        return b"".join(mutator.mutated(FRAMES[4:]) for _ in range(mutator.random.randint(1, 3)))

    fuzz.run(10_000, make, target)


def read_frame(header: wire.Header, body: bytes) -> None:
    """As a server reads it, and as a client."""
    if header.kind is wire.Kind.REQUEST:
        with suppress(InvalidArgumentError):
            method, view = wire.method_of(header), memoryview(body)
            if header.flags & wire.FLAG_DELTA:
                wire.decode_delta(view)
                view = view[wire.DELTA_BYTES :]
            wire_control._parse(method, view).SerializeToString()
        return
    if header.kind is wire.Kind.ERROR:
        assert isinstance(wire.decode_error(header.code, body, "there"), KvstoreError)
    with suppress(UnavailableError):
        wire_link.parsed(pb.MatchResponse, body, "there")


def test_lookups_taken_in_one_pass_mean_what_protobuf_says(fuzz: Fuzz) -> None:
    root = block_pb2.Root(salt="s" * 200, adapter="a")
    prompt = block_pb2.Prompt(ns_id=bytes(16), root=root, tokens=PROMPT)
    body = pb.MatchRequest(session_id=bytes(16), prompt=prompt, peek=True, request_id="r-1").SerializeToString()
    delta = wire.encode_delta(wire.Delta(1, 2, 3, 4))
    seeds = [
        wire.encode_frame(wire.Kind.REQUEST, body, call_id=7, code=wire.Method.Match),
        wire.encode_frame(wire.Kind.REQUEST, delta + body, call_id=8, code=wire.Method.Match, flags=wire.FLAG_DELTA),
    ]

    def target(raw: bytes) -> None:
        lookup = read_lookup(raw, 0, len(raw), BODY_BYTES_MAX)
        if lookup is None:
            return
        assert wire.HEADER_BYTES <= lookup.frame_bytes <= len(raw)
        message = raw[wire.HEADER_BYTES + wire.DELTA_BYTES * lookup.is_grown : lookup.frame_bytes]
        try:
            request = pb.MatchRequest.FromString(message)
        except DecodeError:
            with suppress(InvalidArgumentError):
                root_from_bytes(lookup.root)
                raise AssertionError(lookup) from None  # the root is the only part left to another parser
            return
        expected = (request.session_id, request.prompt.ns_id, request.prompt.tokens, request.peek, request.request_id)
        assert expected == (lookup.session_id, lookup.ns_id, lookup.tokens, lookup.peek, lookup.request_id)

    fuzz.run(10_000, lambda mutator: mutator.mutated(seeds), target)


def test_no_delta_makes_a_prompt_that_was_not_sent(fuzz: Fuzz) -> None:
    """A whole prompt comes of a delta only where its digest is that of its beginning; budgets hold whatever comes."""

    def target(deltas: list[tuple[wire.Delta, bytes]]) -> None:
        budget = PromptBudget(2 * SESSION_BYTES)
        memory = PromptMemory(SESSION_BYTES, budget)
        for delta, tail in deltas:
            prefix_bytes = 4 * delta.prefix_tokens
            try:
                known = memory.complete(delta, tail)
            except InvalidTokensError:
                assert delta.prefix_tokens + len(tail) // 4 >= PROMPT_TOKENS_MAX
                continue
            if known is not None:
                whole = known.packed
                assert tail == whole[prefix_bytes:]
                assert not prefix_bytes or prompt_digest(whole, prefix_bytes) == delta.digest
            assert budget.used_bytes == memory._used_bytes == sum(len(one.packed) for one in memory._prompts.values())
            assert budget.used_bytes <= SESSION_BYTES
            assert len(memory._prompts) <= PROMPTS_MAX
        memory.clear()
        assert budget.used_bytes == 0

    fuzz.run(3_000, lambda mutator: [delta_of(mutator) for _ in range(DELTAS_AT_ONCE)], target)


def delta_of(mutator: Mutator) -> tuple[wire.Delta, bytes]:
    """Often one that fits what was sent before."""
    tokens = mutator.random.randrange(len(PROMPT) // 4)
    ids = mutator.random.randrange(4), mutator.random.randrange(4)
    good = wire.Delta(*ids, tokens, prompt_digest(PROMPT, 4 * tokens))
    tail = PROMPT[4 * tokens :][: 4 * mutator.random.randrange(200)]
    pick = mutator.random.random()
    if pick < 0.3:
        return wire.Delta(*ids, 0, 0), PROMPT
    if pick < 0.7:
        return good, tail
    raw = mutator.mutated([wire.encode_delta(good)])
    return wire.decode_delta(raw.ljust(wire.DELTA_BYTES, b"\0")), mutator.mutated([tail])
