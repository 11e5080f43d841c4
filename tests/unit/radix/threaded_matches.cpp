// Threads match while one thread stores, evicts, drops and reaps: for ThreadSanitizer, and to check every answer. An id
// that is still right under the lock must have the tokens that were looked up.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "radix_tree.h"

namespace {

using namespace kvstore;

constexpr uint32_t kBlockTokens = 4;
constexpr uint32_t kReaders = 3;
constexpr Key128 kRoot = {{1}};

std::mutex callers_lock;
std::atomic<bool> writing{true};
std::atomic<uint64_t> settled{0};
std::atomic<uint64_t> blocks_checked{0};

template <typename Random>
Ids RandomPrompt(Random& random) {
  Ids tokens;
  const uint32_t blocks = 1 + random() % 24;
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t branch = block % 6 == 5 ? random() % 3 : 0;
    for (uint32_t at = 0; at < kBlockTokens; ++at) tokens.push_back(block * 100 + branch * 10 + at);
  }
  return tokens;
}

IdSpan SpanOf(const Ids& ids) { return IdSpan{ids.data(), ids.size()}; }

void Fail(const char* what) {
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

void Read(RadixTree& tree, uint32_t seed) {
  std::mt19937 random(seed);
  while (writing) {
    const Ids tokens = RandomPrompt(random);
    const TokenSpan prompt{tokens.data(), tokens.size()};
    const uint64_t removals = tree.removals();
    const Ids ids = tree.Match(kRoot, prompt);
    const std::lock_guard guard(callers_lock);
    if (tree.removals() != removals) continue;
    ++settled;
    blocks_checked += ids.size();
    const Ids found = tree.Tokens(SpanOf(ids));
    if (!std::equal(found.begin(), found.end(), tokens.begin())) Fail("tokens of a match");
    tree.Touch(SpanOf(ids), random() % 1000, static_cast<int64_t>(ids.size()));
    tree.Lease(SpanOf(ids));
    tree.Release(SpanOf(ids));
  }
}

void Write(RadixTree& tree, uint32_t steps) {
  std::mt19937 random(1);
  uint32_t slot = 0;
  for (uint32_t step = 0; step < steps; ++step) {
    const Ids tokens = RandomPrompt(random);
    const TokenSpan prompt{tokens.data(), tokens.size()};
    const std::lock_guard guard(callers_lock);
    switch (random() % 10) {
      case 0:
        tree.Evict(SpanOf(tree.TakeVictims(0, 8, HUGE_VAL)), 0);
        break;
      case 1:
        tree.DropUnheld(kRoot, prompt, random() % 8);
        break;
      case 2:
        if (step % 50 == 0) tree.Clear();
        break;
      case 3:
      case 4:
        tree.Reap();
        break;
      default:
        const Staged staged = tree.Stage(kRoot, prompt, 0, step % 1000);
        const Ids fresh(staged.ids.begin() + staged.existing_blocks, staged.ids.end());
        Ids slots(fresh.size());
        for (uint32_t& each : slots) each = slot++;
        if (random() % 4 > 0) tree.Place(SpanOf(fresh), 0, SpanOf(slots));
        tree.Release(SpanOf(staged.ids));
    }
    if (step % 64 == 0 && !tree.CheckIntegrity().empty()) Fail("integrity");
  }
  writing = false;
}

}  // namespace

int main(int argc, char** argv) {
  RadixTree tree(kBlockTokens, Key128{{7}}, 0x5EED, 32, "survival", Limits{4, 7});  // so that what is dropped waits for Reap
  std::vector<std::thread> readers;
  for (uint32_t seed = 0; seed < kReaders; ++seed) readers.emplace_back(Read, std::ref(tree), seed + 100);
  Write(tree, argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 20'000);
  for (std::thread& reader : readers) reader.join();
  std::printf("settled %llu blocks %llu\n", static_cast<unsigned long long>(settled),
              static_cast<unsigned long long>(blocks_checked));
}
