"""Writes wire_frames.json: bytes of the fast lane that must never change. python tests/golden/make_wire_frames.py

Made from the tables of transport/README.md by struct alone, without the code that is tested.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

MAGIC = bytes([0x93]) + b"kvwire\n"
SESSION_ID = bytes(range(16))
NS_ID = bytes(range(16, 32))
TOKENS = struct.pack("<4I", 1, 2, 3, 2**32 - 1)


def field(number: int, body: bytes) -> bytes:
    """A protobuf field of bytes, shorter than 128."""
    return bytes([number << 3 | 2, len(body)]) + body


def frame(kind: int, body: bytes, call_id: int, *, code: int = 0, flags: int = 0, deadline_ms: int = 0) -> bytes:
    return struct.pack("<IBBHII", len(body), kind, code, flags, call_id, deadline_ms) + body


PROMPT = field(1, NS_ID) + field(3, TOKENS)
MATCH = field(1, SESSION_ID) + field(2, PROMPT)
DELTA_MATCH = field(1, SESSION_ID) + field(2, field(1, NS_ID) + field(3, TOKENS[8:]))
ERROR = struct.pack("<IB", 1000, 12) + b"NoSpaceError" + b"1024 sessions are open"

GOLDEN = {
    "client hello, control": struct.pack("<8sHHB3x16s", MAGIC, 1, 1, 1, bytes(16)),
    "client hello, bulk": struct.pack("<8sHHB3x16s", MAGIC, 1, 1, 2, SESSION_ID),
    "server hello, welcome": struct.pack("<8sHHHHQ", MAGIC, 1, 1, 1, 0, 4194304),
    "server hello, version": struct.pack("<8sHHHHQ", MAGIC, 0, 1, 1, 1, 4194304),
    "match": frame(1, MATCH, 7, code=3, deadline_ms=5000),
    "match by growth": frame(
        1, struct.pack("<IIIIQ", 2, 1, 2, 0, 0x0389E2C8892D5450) + DELTA_MATCH, 8, code=3, flags=1, deadline_ms=5000
    ),
    "matched": frame(2, bytes.fromhex("0801") + field(2, bytes.fromhex("08021001")), 7),
    "prefetch": frame(1, MATCH + bytes.fromhex("1805"), 10, code=22, deadline_ms=5000),
    "prefetched": frame(2, bytes.fromhex("08011001"), 10),
    "cancel prefetch": frame(1, field(1, SESSION_ID) + bytes.fromhex("1005"), 11, code=23, deadline_ms=5000),
    "resend": frame(4, b"", 8),
    "error": frame(3, ERROR, 9, code=8),
    "data": frame(5, b"rows", 1),
    "client hello, arena": struct.pack("<8sHHB3x16s", MAGIC, 1, 1, 3, SESSION_ID),
    "server hello, no arena": struct.pack("<8sHHHHQ", MAGIC, 0, 1, 1, 5, 4194304),
    "arena: board": frame(5, struct.pack("<II", 1024, 0), 0),
    "arena: board that knows PLACE_PART": frame(5, struct.pack("<II", 1024, 1), 0),
    "arena: place": frame(1, struct.pack("<QII", 77, 1, 0), 12, code=1),
    "arena: place all parts": frame(1, struct.pack("<QII", 77, 2**32 - 1, 0), 12, code=1),
    "arena: place part": frame(1, struct.pack("<QII", 77, 3, 0), 12, code=3),
    "arena: mappings": frame(
        5, struct.pack("<II", 1, 0) + struct.pack("<IIIIQ4Q", 3, 100, 50, 2, 28672, 333, 160, 0, 20480), 12
    ),
    "arena: placed": frame(2, struct.pack("<IIII", 9, 2, 3, 0) + struct.pack("<5I", 3, 4, 100, 101, 7), 12),
    "arena: placed part": frame(
        2, struct.pack("<III", 1, 2, 1) + struct.pack("<IIII", 9, 2, 3, 0) + struct.pack("<5I", 3, 4, 100, 101, 7), 12
    ),
    "arena: sync": frame(1, struct.pack("<2I", 3, 4), 13, code=2),
    "arena: recalled": frame(2, struct.pack("<I", 5), 13),
}

if __name__ == "__main__":
    texts = {name: raw.hex() for name, raw in GOLDEN.items()}
    Path(__file__).with_name("wire_frames.json").write_text(json.dumps(texts, indent=1) + "\n")
