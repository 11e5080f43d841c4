// Fixed pieces of work of the index, one by name: bench_instructions.py counts the instructions of `measured`, which
// nothing but the code decides. No clock, no random seed, no Python.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "radix_tree.h"

using namespace kvstore;

namespace {

constexpr uint32_t kBlockTokens = 16;
constexpr uint32_t kPromptBlocks = 512;  // 8k tokens
constexpr uint32_t kSystemBlocks = 128;
constexpr uint32_t kPrompts = 64;
constexpr uint32_t kVictims = 1024;
constexpr Key128 kRoot = {{1}};

IdSpan SpanOf(const Ids& ids) { return IdSpan{ids.data(), ids.size()}; }

// One of the system prompts that many share, and then a text of its own.
Ids Prompt(uint32_t number) {
  Ids tokens(kPromptBlocks * kBlockTokens);
  const auto own = tokens.begin() + kSystemBlocks * kBlockTokens;
  std::iota(tokens.begin(), own, number % 4 * 10'000);
  std::iota(own, tokens.end(), 1'000'000 + number * 10'000);
  return tokens;
}

class Filled {
 public:
  Filled() : tree_(kBlockTokens, Key128{{7}}, 0x5EED, 32, "survival") {
    for (uint32_t number = 0; number < kPrompts; ++number) Insert(Prompt(number));
  }

  size_t Match(const Ids& tokens) const { return tree_.Match(kRoot, SpanOf(tokens)).size(); }

  size_t Insert(const Ids& tokens) {
    const Staged staged = tree_.Stage(kRoot, SpanOf(tokens), 0, ++tick_);
    Ids slots(staged.ids.size());
    std::iota(slots.begin(), slots.end(), slot_);
    slot_ += static_cast<uint32_t>(slots.size());
    tree_.Place(SpanOf(staged.ids), 0, SpanOf(slots));
    tree_.Release(SpanOf(staged.ids));
    return staged.ids.size() - staged.existing_blocks;
  }

  size_t Evict() {
    const Ids victims = tree_.TakeVictims(0, kVictims, 1e300);
    while (!tree_.PrepareKeys(SpanOf(victims))) continue;
    const Removed removed = tree_.Evict(SpanOf(victims), 0);
    while (tree_.condemned()) tree_.Reap();
    return removed.slots[0].size();
  }

 private:
  RadixTree tree_;
  uint64_t tick_ = 0;
  uint32_t slot_ = 0;
};

size_t HashKeys(const Ids& tokens) {
  const Key128 ns_key = {{7}};
  Key128 key = kRoot;
  for (size_t at = 0; at < tokens.size(); at += kBlockTokens) {
    key = BlockKey(ns_key.bytes, key, tokens.data() + at, kBlockTokens);
  }
  return key.bytes[0] == 0 ? 0 : tokens.size() / kBlockTokens;
}

struct Work {
  std::function<size_t()> run;
  size_t expected;
};

std::optional<Work> WorkNamed(const std::string& name, Filled& filled) {
  const Ids known = Prompt(3);
  const Ids fresh = Prompt(kPrompts + 3);
  Ids unknown(known.size());
  std::iota(unknown.begin(), unknown.end(), 50'000'000);
  if (name == "match") return Work{[&filled, known] { return filled.Match(known); }, kPromptBlocks};
  if (name == "miss") return Work{[&filled, unknown] { return filled.Match(unknown); }, 0};
  if (name == "insert") return Work{[&filled, fresh] { return filled.Insert(fresh); }, kPromptBlocks - kSystemBlocks};
  if (name == "evict") return Work{[&filled] { return filled.Evict(); }, kVictims};
  if (name == "key_hash") return Work{[known] { return HashKeys(known); }, kPromptBlocks};
  return std::nullopt;
}

}  // namespace

extern "C" __attribute__((noinline)) size_t measured(const std::function<size_t()>& run) { return run(); }

int main(int count, char** words) {
  Filled filled;
  const std::optional<Work> work = count == 2 ? WorkNamed(words[1], filled) : std::nullopt;
  if (!work) {
    std::fprintf(stderr, "expected one of: match miss insert evict key_hash\n");
    return 2;
  }
  const size_t done = measured(work->run);
  if (done == work->expected) return 0;
  std::fprintf(stderr, "%s: did %zu, expected %zu\n", words[1], done, work->expected);
  return 1;
}
