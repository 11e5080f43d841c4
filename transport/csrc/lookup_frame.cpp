#include "lookup_frame.h"

#include <cstring>

namespace kvstore {

namespace {

// On the wire: never renumber. Those of wire.py, and tags of kvstore.v1: field << 3 | type.
constexpr size_t kHeaderBytes = 16;
constexpr size_t kDeltaBytes = 24;
constexpr uint8_t kRequest = 1;
constexpr uint8_t kResponse = 2;
constexpr uint8_t kMatch = 3;
constexpr uint16_t kFlagDelta = 1;
constexpr uint8_t kSessionId = 1 << 3 | 2;
constexpr uint8_t kPrompt = 2 << 3 | 2;
constexpr uint8_t kPeek = 3 << 3;
constexpr uint8_t kRequestId = 15 << 3 | 2;
constexpr uint8_t kNsId = 1 << 3 | 2;
constexpr uint8_t kRoot = 2 << 3 | 2;
constexpr uint8_t kTokens = 3 << 3 | 2;
constexpr size_t kMessageBytesMax = (size_t{1} << 31) - 1;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are copied as they lie in memory");

template <typename Number>
Number Load(const uint8_t* from) {
  Number number;
  std::memcpy(&number, from, sizeof(number));
  return number;
}

template <typename Number>
uint8_t* Store(uint8_t* to, Number number) {
  std::memcpy(to, &number, sizeof(number));
  return to + sizeof(number);
}

// Takes fields off the front of a message.
class Fields {
 public:
  explicit Fields(Span message) : at_(message.data), end_(message.data + message.size) {}

  bool done() const { return at_ == end_; }

  // The field of this tag, if it is the next one. False only where its length makes no sense.
  bool Take(uint8_t tag, Span* value) {
    if (done() || *at_ != tag) return true;
    ++at_;
    size_t length = 0;
    if (!TakeLength(&length)) return false;
    *value = {at_, length};
    at_ += length;
    return true;
  }

  bool TakeFlag(uint8_t tag, bool* value) {
    if (done() || *at_ != tag) return true;
    if (end_ - at_ < 2 || at_[1] > 1) return false;
    *value = at_[1] == 1;
    at_ += 2;
    return true;
  }

 private:
  bool TakeLength(size_t* length) {
    for (int shift = 0; shift < 35; shift += 7) {
      if (done()) return false;
      const uint8_t group = *at_++;
      *length |= static_cast<size_t>(group & 0x7F) << shift;
      if (group < 0x80) return *length <= static_cast<size_t>(end_ - at_);
    }
    return false;
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

bool IsAscii(Span text) {
  for (size_t i = 0; i < text.size; ++i) {
    if (text.data[i] >= 0x80) return false;
  }
  return true;
}

bool ReadPrompt(Span message, LookupFrame* frame) {
  Fields fields(message);
  return fields.Take(kNsId, &frame->ns_id) && fields.Take(kRoot, &frame->root) &&
         fields.Take(kTokens, &frame->tokens) && fields.done();
}

bool ReadMessage(Span message, LookupFrame* frame) {
  Fields fields(message);
  Span prompt;
  return fields.Take(kSessionId, &frame->session_id) && fields.Take(kPrompt, &prompt) &&
         fields.TakeFlag(kPeek, &frame->peek) && fields.Take(kRequestId, &frame->request_id) && fields.done() &&
         IsAscii(frame->request_id) && ReadPrompt(prompt, frame);
}

size_t LengthBytes(size_t length) {
  size_t bytes = 1;
  while (length > 0x7F) {
    length >>= 7;
    ++bytes;
  }
  return bytes;
}

size_t FieldBytes(Span value) { return value.size == 0 ? 0 : 1 + LengthBytes(value.size) + value.size; }

uint8_t* WriteTag(uint8_t* to, uint8_t tag, size_t length) {
  *to++ = tag;
  while (length > 0x7F) {
    *to++ = static_cast<uint8_t>(length & 0x7F) | 0x80;
    length >>= 7;
  }
  *to++ = static_cast<uint8_t>(length);
  return to;
}

uint8_t* WriteSpan(uint8_t* to, Span value) {
  if (value.size > 0) std::memcpy(to, value.data, value.size);
  return to + value.size;
}

uint8_t* WriteField(uint8_t* to, uint8_t tag, Span value) {
  return value.size == 0 ? to : WriteSpan(WriteTag(to, tag, value.size), value);
}

size_t PromptBytes(const LookupDraft& draft) { return draft.prompt_head.size + FieldBytes(draft.frame.tokens); }

size_t BodyBytes(const LookupDraft& draft) {
  const size_t prompt_bytes = PromptBytes(draft);
  return (draft.frame.is_grown ? kDeltaBytes : 0) + FieldBytes(draft.frame.session_id) + 1 +
         LengthBytes(prompt_bytes) + prompt_bytes + (draft.frame.peek ? 2 : 0) + FieldBytes(draft.frame.request_id);
}

uint8_t* WriteHead(uint8_t* to, const LookupFrame& frame, size_t body_bytes) {
  to = Store(to, static_cast<uint32_t>(body_bytes));
  *to++ = kRequest;
  *to++ = kMatch;
  to = Store(to, frame.is_grown ? kFlagDelta : uint16_t{0});
  to = Store(to, frame.call_id);
  to = Store(to, frame.deadline_ms);
  if (!frame.is_grown) return to;
  to = Store(to, frame.delta.prompt_id);
  to = Store(to, frame.delta.base_id);
  to = Store(to, frame.delta.prefix_tokens);
  to = Store(to, uint32_t{0});
  return Store(to, frame.delta.digest);
}

}  // namespace

bool ReadLookup(Span bytes, size_t body_bytes_max, LookupFrame* frame) {
  if (bytes.size < kHeaderBytes) return false;
  const uint8_t* header = bytes.data;
  const size_t body_bytes = Load<uint32_t>(header);
  const uint16_t flags = Load<uint16_t>(header + 6);
  if (header[4] != kRequest || header[5] != kMatch || (flags & ~kFlagDelta) != 0) return false;
  if (body_bytes > body_bytes_max || body_bytes > bytes.size - kHeaderBytes) return false;
  *frame = LookupFrame{};
  frame->call_id = Load<uint32_t>(header + 8);
  frame->deadline_ms = Load<uint32_t>(header + 12);
  frame->frame_bytes = kHeaderBytes + body_bytes;
  frame->is_grown = flags == kFlagDelta;
  Span message{header + kHeaderBytes, body_bytes};
  if (frame->is_grown) {
    if (body_bytes < kDeltaBytes) return false;
    const uint8_t* delta = message.data;
    frame->delta = {Load<uint32_t>(delta), Load<uint32_t>(delta + 4), Load<uint32_t>(delta + 8),
                    Load<uint64_t>(delta + 16)};
    message = {delta + kDeltaBytes, body_bytes - kDeltaBytes};
  }
  return ReadMessage(message, frame);
}

bool ReadResponse(Span bytes, uint32_t call_id, Span* body) {
  if (bytes.size < kHeaderBytes || Load<uint32_t>(bytes.data) != bytes.size - kHeaderBytes) return false;
  if (bytes.data[4] != kResponse || Load<uint16_t>(bytes.data + 6) != 0) return false;
  if (Load<uint32_t>(bytes.data + 8) != call_id) return false;
  *body = {bytes.data + kHeaderBytes, bytes.size - kHeaderBytes};
  return true;
}

size_t LookupBytes(const LookupDraft& draft) {
  const size_t body_bytes = BodyBytes(draft);
  return body_bytes > kMessageBytesMax ? 0 : kHeaderBytes + body_bytes;
}

void WriteLookup(const LookupDraft& draft, uint8_t* target) {
  const LookupFrame& frame = draft.frame;
  uint8_t* to = WriteHead(target, frame, BodyBytes(draft));
  to = WriteField(to, kSessionId, frame.session_id);
  to = WriteTag(to, kPrompt, PromptBytes(draft));
  to = WriteSpan(to, draft.prompt_head);
  to = WriteField(to, kTokens, frame.tokens);
  if (frame.peek) {
    *to++ = kPeek;
    *to++ = 1;
  }
  WriteField(to, kRequestId, frame.request_id);
}

}  // namespace kvstore
