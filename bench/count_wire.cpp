// Fixed pieces of work of the fast lane's codec, one by name: see count_tree.cpp. Tokens lie in a frame as they
// lie in memory, so reading takes no longer for a long prompt; each piece is a thousand frames.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lookup_frame.h"

using namespace kvstore;

namespace {

constexpr size_t kFrames = 1000;
constexpr size_t kTokenBytes = 256 * 4;
constexpr size_t kBodyBytesMax = 1 << 20;

using Bytes = std::vector<uint8_t>;

Span SpanOf(const Bytes& bytes) { return Span{bytes.data(), bytes.size()}; }

// A lookup of 256 tokens in a session, with a request id.
class Lookup {
 public:
  Lookup() : session_(16, 0x51), head_(18, 0x16), request_id_(36, 'r'), tokens_(kTokenBytes, 7) {
    head_[0] = 1 << 3 | 2;  // ns_id of 16 bytes
    head_[1] = 16;
    draft_.frame.call_id = 9;
    draft_.frame.deadline_ms = 100;
    draft_.frame.session_id = SpanOf(session_);
    draft_.frame.tokens = SpanOf(tokens_);
    draft_.frame.request_id = SpanOf(request_id_);
    draft_.prompt_head = SpanOf(head_);
    bytes_.resize(LookupBytes(draft_));
    WriteLookup(draft_, bytes_.data());
    response_ = bytes_;
    response_[4] = 2;  // the kind of a response
  }

  size_t Read() const {
    size_t read = 0;
    LookupFrame frame;
    for (size_t i = 0; i < kFrames; ++i) read += ReadLookup(SpanOf(bytes_), kBodyBytesMax, &frame);
    return frame.tokens.size == kTokenBytes ? read : 0;
  }

  size_t ReadResponses() const {
    size_t read = 0;
    Span body;
    for (size_t i = 0; i < kFrames; ++i) read += ReadResponse(SpanOf(response_), 9, &body);
    return read;
  }

  size_t Write() {
    for (size_t i = 0; i < kFrames; ++i) WriteLookup(draft_, bytes_.data());
    return kFrames;
  }

 private:
  Bytes session_, head_, request_id_, tokens_, bytes_, response_;
  LookupDraft draft_;
};

std::optional<std::function<size_t()>> WorkNamed(const std::string& name, Lookup& lookup) {
  if (name == "read_lookup") return [&lookup] { return lookup.Read(); };
  if (name == "read_response") return [&lookup] { return lookup.ReadResponses(); };
  if (name == "write_lookup") return [&lookup] { return lookup.Write(); };
  return std::nullopt;
}

}  // namespace

extern "C" __attribute__((noinline)) size_t measured(const std::function<size_t()>& run) { return run(); }

int main(int count, char** words) {
  Lookup lookup;
  const auto work = count == 2 ? WorkNamed(words[1], lookup) : std::nullopt;
  if (!work) {
    std::fprintf(stderr, "expected one of: read_lookup read_response write_lookup\n");
    return 2;
  }
  const size_t done = measured(*work);
  if (done == kFrames) return 0;
  std::fprintf(stderr, "%s: %zu of %zu frames\n", words[1], done, kFrames);
  return 1;
}
