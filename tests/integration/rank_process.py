"""One writer rank of an engine: `python rank_process.py ADDRESS RANK`. Reads commands, answers each with a line.

stage N    stage prompt N             -> blocks that want bytes
write      write this rank's parts    -> rows taken
commit     commit its share           -> blocks that became visible
"""

from __future__ import annotations

import dataclasses
import sys

import kvstore
from kvstore.errors import KvstoreError
from kvstore.testing import conformance_sparse
from kvstore.testing.blocks import expected_part_rows, write_sparse

RANKED = dataclasses.replace(conformance_sparse.RANKED, secret=None)


def main() -> None:
    """Do as stdin says."""
    address, rank = sys.argv[1], int(sys.argv[2])
    with kvstore.connect(address) as client:
        prompt: list[int] = []
        stage = client.stage(RANKED, prompt, rank=rank)
        for line in sys.stdin:
            command, *numbers = line.split()
            try:
                if command == "stage":
                    prompt = [int(number) for number in numbers]
                    stage = client.stage(RANKED, prompt, rank=rank)
                    answer = stage.blocks
                elif command == "write":
                    answer = sum(
                        write_sparse(stage, part, expected_part_rows(RANKED, prompt, part))
                        for part, found in enumerate(RANKED.layout.parts)
                        if found.writer == rank
                    )
                else:
                    answer = stage.commit().blocks
                print(answer, flush=True)  # noqa: T201  # the test reads it
            except KvstoreError as error:
                print(type(error).__name__, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
