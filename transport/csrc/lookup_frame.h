// A request of Match as a frame of the fast lane: header, delta and message, read and written in one pass. transport/
// README.md has the frame byte by byte. No Python in here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

struct Span {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

// What a delta says: the first `prefix_tokens` are those remembered under `base_id`.
struct Delta {
  uint32_t prompt_id = 0;
  uint32_t base_id = 0;
  uint32_t prefix_tokens = 0;
  uint64_t digest = 0;
};

// Spans lie in the frame that was read; those of one to be written belong to the caller.
struct LookupFrame {
  uint32_t call_id = 0;
  uint32_t deadline_ms = 0;
  bool is_grown = false;  // whether there is a delta
  Delta delta;
  Span session_id;
  Span ns_id;
  Span root;  // a Root message, empty for the plain one
  Span tokens;
  bool peek = false;
  Span request_id;
  size_t frame_bytes = 0;
};

// Whether `bytes` begin with such a frame, whole and of at most `body_bytes_max`, that has each field at most once, in
// ascending order, and none but these. A frame that is not taken may still be a request, for a full parser; one that
// is means what protobuf reads in it. Request ids that are not ASCII are left to protobuf, which checks their UTF-8.
bool ReadLookup(Span bytes, size_t body_bytes_max, LookupFrame* frame);

// Whether `bytes` are just one RESPONSE to that call, whole; `body` is then what it holds.
bool ReadResponse(Span bytes, uint32_t call_id, Span* body);

// A frame to be written. `prompt_head` are the bytes of a Prompt without tokens; empty fields are left out.
struct LookupDraft {
  LookupFrame frame;  // but for ns_id and root, which are in:
  Span prompt_head;
};

// Bytes of the frame; 0 where it cannot be one, since its body has 2^31 bytes or more.
size_t LookupBytes(const LookupDraft& draft);
void WriteLookup(const LookupDraft& draft, uint8_t* target);

}  // namespace kvstore
