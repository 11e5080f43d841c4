"""A publisher of KV events as vLLM has one: `python engine_publisher_process.py EVENTS REPLAYS`, commands on stdin.

A line is a JSON list of events to publish as one batch, {"lose": [...]}, which takes a number and sends nothing live,
or {"raw": text}, which sends these bytes for a batch. Each is answered by the number of the batch.
"""

from __future__ import annotations

import json
import sys
import time

import msgspec
import zmq


def say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(events, replays):
    context = zmq.Context()
    live, repeat = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    live.bind(events)
    repeat.bind(replays)
    poller = zmq.Poller()
    poller.register(repeat, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    sent = []
    say("ready")
    while True:
        ready = dict(poller.poll())
        if repeat in ready:
            client, _, first = repeat.recv_multipart()
            for number, payload in enumerate(sent):
                if number >= int.from_bytes(first, "big"):
                    repeat.send_multipart((client, b"", b"kv", number.to_bytes(8, "big"), payload))
            repeat.send_multipart((client, b"", b"", b"\xff" * 8, b""))
        if sys.stdin.fileno() in ready:
            line = sys.stdin.buffer.raw.readline()
            if not line:
                return
            asked = json.loads(line)
            is_lost = isinstance(asked, dict) and "lose" in asked
            if isinstance(asked, dict) and "raw" in asked:
                payload = asked["raw"].encode()
            else:
                payload = msgspec.msgpack.encode([time.time(), asked["lose"] if is_lost else asked, 0])
            sent.append(payload)
            if not is_lost:
                live.send_multipart((b"kv", (len(sent) - 1).to_bytes(8, "big"), payload))
            say(len(sent) - 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
