// Python face of the frames: converts arguments and results, nothing else.
#include <nanobind/nanobind.h>

#include <sys/socket.h>

#include "lookup_frame.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using kvstore::LookupDraft;
using kvstore::LookupFrame;
using kvstore::Span;

// The bytes of an object, held as long as this.
class View {
 public:
  explicit View(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&buffer_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  Span span() const { return {static_cast<const uint8_t*>(buffer_.buf), static_cast<size_t>(buffer_.len)}; }

 private:
  Py_buffer buffer_;
};

nb::bytes ToBytes(Span span) { return nb::bytes(reinterpret_cast<const char*>(span.data), span.size); }

Span AsSpan(const nb::bytes& bytes) { return {reinterpret_cast<const uint8_t*>(bytes.c_str()), bytes.size()}; }

// A lookup that was read; its bytes are copies, for the buffer of a connection is used again.
struct Lookup {
  explicit Lookup(const LookupFrame& frame)
      : call_id(frame.call_id),
        frame_bytes(frame.frame_bytes),
        is_grown(frame.is_grown),
        prefix_tokens(frame.delta.prefix_tokens),
        peek(frame.peek),
        delta(nb::make_tuple(frame.delta.prompt_id, frame.delta.base_id, frame.delta.prefix_tokens,
                             frame.delta.digest)),
        session_id(ToBytes(frame.session_id)),
        ns_id(ToBytes(frame.ns_id)),
        root(ToBytes(frame.root)),
        tokens(ToBytes(frame.tokens)),
        request_id(reinterpret_cast<const char*>(frame.request_id.data), frame.request_id.size) {}

  uint32_t call_id;
  size_t frame_bytes;
  bool is_grown;
  uint32_t prefix_tokens;
  bool peek;
  nb::tuple delta;
  nb::bytes session_id;
  nb::bytes ns_id;
  nb::bytes root;
  nb::bytes tokens;
  nb::str request_id;
};

Span Part(const View& view, size_t begin, size_t end) {
  const Span all = view.span();
  if (begin > end || end > all.size) throw nb::value_error("begin..end is no part of the buffer");
  return {all.data + begin, end - begin};
}

nb::object ReadLookup(nb::handle buffer, size_t begin, size_t end, size_t body_bytes_max) {
  const View view(buffer);
  LookupFrame frame;
  if (!kvstore::ReadLookup(Part(view, begin, end), body_bytes_max, &frame)) return nb::none();
  return nb::cast(Lookup(frame));
}

nb::object ReadResponse(nb::handle buffer, size_t begin, size_t end, uint32_t call_id) {
  const View view(buffer);
  Span body;
  if (!kvstore::ReadResponse(Part(view, begin, end), call_id, &body)) return nb::none();
  return ToBytes(body);
}

nb::bytes Write(const LookupDraft& draft) {
  const size_t frame_bytes = kvstore::LookupBytes(draft);
  if (frame_bytes == 0) throw nb::value_error("the request has 2 GiB or more");
  PyObject* frame = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(frame_bytes));
  if (frame == nullptr) throw nb::python_error();
  kvstore::WriteLookup(draft, reinterpret_cast<uint8_t*>(PyBytes_AsString(frame)));
  return nb::steal<nb::bytes>(frame);
}

LookupDraft Draft(uint32_t call_id, uint32_t deadline_ms, const nb::bytes& session_id, const nb::bytes& prompt_head,
                  Span tokens, bool peek, const nb::bytes& request_id) {
  LookupDraft draft;
  draft.frame.call_id = call_id;
  draft.frame.deadline_ms = deadline_ms;
  draft.frame.session_id = AsSpan(session_id);
  draft.frame.tokens = tokens;
  draft.frame.peek = peek;
  draft.frame.request_id = AsSpan(request_id);
  draft.prompt_head = AsSpan(prompt_head);
  return draft;
}

nb::bytes WriteLookup(uint32_t call_id, uint32_t deadline_ms, const nb::bytes& session_id,
                      const nb::bytes& prompt_head, const nb::bytes& tokens, bool peek, const nb::bytes& request_id) {
  return Write(Draft(call_id, deadline_ms, session_id, prompt_head, AsSpan(tokens), peek, request_id));
}

nb::bytes WriteGrownLookup(uint32_t call_id, uint32_t deadline_ms, const nb::bytes& session_id,
                           const nb::bytes& prompt_head, const nb::bytes& tail, bool peek, const nb::bytes& request_id,
                           uint32_t prompt_id, uint32_t base_id, uint32_t prefix_tokens, uint64_t digest) {
  LookupDraft draft = Draft(call_id, deadline_ms, session_id, prompt_head, AsSpan(tail), peek, request_id);
  draft.frame.is_grown = true;
  draft.frame.delta = {prompt_id, base_id, prefix_tokens, digest};
  return Write(draft);
}

// Sends what a socket takes at once, in a few microseconds, for which the GIL is kept: getting it back would take longer,
// and beside a busy thread a hundred times as long. Errors are left to the next who uses the socket.
size_t SendNow(int descriptor, const nb::bytes& frame) {
  const ssize_t sent = send(descriptor, frame.c_str(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent < 0 ? 0 : static_cast<size_t>(sent);
}

}  // namespace

NB_MODULE(_frames, module) {
  nb::class_<Lookup>(module, "Lookup")
      .def_ro("call_id", &Lookup::call_id)
      .def_ro("frame_bytes", &Lookup::frame_bytes)
      .def_ro("is_grown", &Lookup::is_grown)
      .def_ro("prefix_tokens", &Lookup::prefix_tokens)
      .def_ro("peek", &Lookup::peek)
      .def_ro("delta", &Lookup::delta)
      .def_ro("session_id", &Lookup::session_id)
      .def_ro("ns_id", &Lookup::ns_id)
      .def_ro("root", &Lookup::root)
      .def_ro("tokens", &Lookup::tokens)
      .def_ro("request_id", &Lookup::request_id);
  module.def("send_now", &SendNow, "descriptor"_a, "frame"_a);
  module.def("read_lookup", &ReadLookup, "buffer"_a, "begin"_a, "end"_a, "body_bytes_max"_a);
  module.def("read_response", &ReadResponse, "buffer"_a, "begin"_a, "end"_a, "call_id"_a);
  module.def("write_lookup", &WriteLookup, "call_id"_a, "deadline_ms"_a, "session_id"_a, "prompt_head"_a, "tokens"_a,
             "peek"_a, "request_id"_a);
  module.def("write_grown_lookup", &WriteGrownLookup, "call_id"_a, "deadline_ms"_a, "session_id"_a, "prompt_head"_a,
             "tail"_a, "peek"_a, "request_id"_a, "prompt_id"_a, "base_id"_a, "prefix_tokens"_a, "digest"_a);
}
