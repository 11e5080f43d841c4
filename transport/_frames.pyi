class Lookup:
    @property
    def call_id(self) -> int: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def is_grown(self) -> bool: ...
    @property
    def prefix_tokens(self) -> int: ...
    @property
    def peek(self) -> bool: ...
    @property
    def delta(self) -> tuple[int, int, int, int]: ...
    @property
    def session_id(self) -> bytes: ...
    @property
    def ns_id(self) -> bytes: ...
    @property
    def root(self) -> bytes: ...
    @property
    def tokens(self) -> bytes: ...
    @property
    def request_id(self) -> str: ...

def read_lookup(buffer: bytes | bytearray | memoryview, begin: int, end: int, body_bytes_max: int) -> Lookup | None: ...
def write_lookup(
    call_id: int,
    deadline_ms: int,
    session_id: bytes,
    prompt_head: bytes,
    tokens: bytes,
    peek: bool,
    request_id: bytes,
) -> bytes: ...
def write_grown_lookup(
    call_id: int,
    deadline_ms: int,
    session_id: bytes,
    prompt_head: bytes,
    tail: bytes,
    peek: bool,
    request_id: bytes,
    prompt_id: int,
    base_id: int,
    prefix_tokens: int,
    digest: int,
) -> bytes: ...
