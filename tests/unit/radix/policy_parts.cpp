// The parts that eviction policies are made of, driven by lines of commands: "runs append 3 8" and so on. Each is answered
// by one line that tells the state. test_policy_parts.py compares the answers with naive models.
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "ghosts.h"
#include "runs.h"
#include "survival.h"
#include "victim_queues.h"

namespace kvstore {

constexpr uint32_t kNodes = 16;
constexpr uint16_t kQueues = 4;

History HistoryOf(uint64_t tick) {
  History history;
  history.tick = tick;
  return history;
}

// Two edges, of which the second begins where the first ends.
struct RunsPart {
  Runs head;
  Runs tail;
  uint32_t begin = 0;

  void Do(const std::string& verb, std::istream& in, std::ostream& out) {
    uint64_t first = 0;
    uint32_t second = 0;
    uint64_t third = 0;
    in >> first >> second >> third;
    const auto depth = static_cast<uint32_t>(first);
    if (verb == "new") *this = RunsPart{{}, {}, depth};
    if (verb == "append") head.Append(HistoryOf(first), second);
    if (verb == "split") tail = head.SplitAt(depth);
    if (verb == "truncate") head.Truncate(begin, depth);
    if (verb == "merge") {
      tail.Prepend(head);
      head = std::exchange(tail, Runs());
    }
    if (verb == "update") {
      head.Update(begin, depth, second, [&](const History& history, uint32_t from, uint32_t to) {
        return HistoryOf(history.tick / 2 + third + (from < to ? 0 : 1'000'000));
      });
    }
    if (verb == "at") out << head.At(depth).tick << ' ' << head.BeginOf(depth, begin) << ' ';
    if (verb == "each") {
      head.ForEach(begin, depth, second, [&](const History& history, uint32_t from, uint32_t to) {
        out << history.tick << ' ' << from << ' ' << to << ' ';
      });
    }
    for (const Runs* runs : {&head, &tail}) {
      out << "| ";
      for (const History& run : runs->all()) out << run.tick << ' ' << run.end << ' ';
    }
  }
};

struct GhostsPart {
  Ghosts ghosts;
  size_t size_max = 0;

  // Saves all in slices of seven, and restores them.
  void Reload() {
    std::vector<std::pair<uint64_t, History>> saved;
    uint64_t next = 0;
    do {
      next = ghosts.VisitFrom(next, 7, [&](uint64_t fingerprint, const History& history) {
        saved.emplace_back(fingerprint, history);
      });
    } while (next != 0);
    ghosts.StartAnew(ghosts.mask());
    for (const auto& [fingerprint, history] : saved) ghosts.Restore(fingerprint, history);
  }

  void Do(const std::string& verb, std::istream& in, std::ostream& out) {
    uint64_t fingerprint = 0;
    in >> fingerprint;
    if (verb == "new") *this = GhostsPart();
    if (verb == "add") {
      uint64_t tick = 0;
      uint64_t count = 0;
      double ghosts_max = 0;
      in >> tick >> count >> ghosts_max;
      for (uint64_t at = 0; at < count; ++at) {
        const auto forget = [&](const History& history) { out << history.tick << ' '; };
        if (ghosts.Keeps(fingerprint + (at << 32))) {
          ghosts.Add(fingerprint + (at << 32), HistoryOf(tick + at), ghosts_max, forget);
        } else {
          forget(HistoryOf(tick + at));
        }
      }
    }
    if (verb == "reload") Reload();
    if (verb == "take") {
      const std::optional<History> taken = ghosts.Take(fingerprint);
      if (taken) out << taken->tick << ' ';
    }
    size_max = std::max(size_max, ghosts.size() + 1);
    out << "| " << ghosts.size() << ' ' << (ghosts.bytes() <= 160 * size_max + 4096);
  }
};

struct QueuesPart {
  NodePool nodes;
  VictimQueues queues{&nodes, 0};

  QueuesPart() {
    for (uint32_t node = 0; node < kNodes; ++node) nodes[nodes.Allocate()].is_live = true;
  }

  bool IsSound() const {
    bool is_sound = queues.IsCounted();
    for (uint16_t queue = 0; queue < queues.queue_count(); ++queue) {
      for (int end = 0; end < 2; ++end) {
        for (size_t at = 0; at < queues.EntryCount(queue, end); ++at) is_sound &= queues.IsSoundAt(queue, end, at);
      }
    }
    return is_sound;
  }

  void Do(const std::string& verb, std::istream& in, std::ostream& out) {
    uint32_t node = 0;
    uint16_t queue = 0;
    uint64_t rank = 0;
    in >> node >> queue >> rank;
    if (verb == "new") {
      for (uint32_t each = 0; each < kNodes; ++each) queues.Remove(each);
    }
    if (verb == "set") queues.Set(node, queue, VictimRank{rank, node});
    if (verb == "remove") queues.Remove(node);
    out << queues.size() << ' ' << IsSound();
    const std::vector<uint16_t>& open = queues.open_queues();
    for (uint16_t each = 0; each < kQueues; ++each) {
      const QueueEnd first = queues.First(each);
      const QueueEnd last = queues.Last(each);
      const bool is_open = std::count(open.begin(), open.end(), each) == 1;
      out << " | " << is_open << ' ';
      if (is_open) {
        out << first.node << ' ' << first.rank << ' ' << last.node << ' ' << last.rank << ' ' << queues.Version(each);
      }
    }
  }
};

struct LivesPart {
  LifeTable lives;

  void Do(const std::string& verb, std::istream& in, std::ostream& out) {
    uint64_t born = 0;
    uint64_t now = 0;
    double weight = 0;
    in >> born >> now >> weight;
    if (verb == "new") lives = LifeTable();
    if (verb == "begin") lives.Begin(born, weight);
    if (verb == "use") lives.EndByUse(born, now, weight);
    if (verb == "unused") lives.EndUnused(born, now, weight);
    if (verb == "sum") {
      Bins uses;
      Bins exposure;
      lives.Sum(now, &uses, &exposure);
      for (double value : uses) out << value << ' ';
      for (double value : exposure) out << value << ' ';
    }
    if (verb == "index") {
      Bins hazards;
      double risk = 0;
      in.clear();
      in.seekg(std::string("lives index").size());
      in >> risk;
      for (double& hazard : hazards) in >> hazard;
      for (double value : GittinsIndices(hazards, risk)) out << value << ' ';
    }
    if (verb == "bin") out << AgeBin(static_cast<double>(born) / 1000) << ' ';
  }
};

}  // namespace kvstore

int main() {
  kvstore::RunsPart runs;
  kvstore::GhostsPart ghosts;
  kvstore::QueuesPart queues;
  kvstore::LivesPart lives;
  std::cout.precision(12);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::ostringstream out;
    out.precision(12);
    std::string part;
    std::string verb;
    in >> part >> verb;
    if (part == "runs") runs.Do(verb, in, out);
    if (part == "ghosts") ghosts.Do(verb, in, out);
    if (part == "queues") queues.Do(verb, in, out);
    if (part == "lives") lives.Do(verb, in, out);
    std::cout << out.str() << std::endl;
  }
}
