#include "policy.h"

#include <stdexcept>

#include "reference_policies.h"
#include "survival.h"

namespace kvstore {

const std::vector<std::string>& PolicyNames() {
  static const std::vector<std::string> names = {"survival", "survival_flops", "lru", "lfu", "fifo", "s3fifo", "sieve"};
  return names;
}

std::unique_ptr<EvictionPolicy> MakePolicy(const std::string& name, uint32_t block_tokens, uint32_t prefix_blocks) {
  if (name == "survival") return std::make_unique<SurvivalPolicy>(block_tokens, prefix_blocks);
  if (name == "survival_flops") return std::make_unique<SurvivalPolicy>(block_tokens, prefix_blocks, HitWorth::kFlops);
  if (name == "lru") return std::make_unique<LruPolicy>();
  if (name == "lfu") return std::make_unique<LfuPolicy>();
  if (name == "fifo") return std::make_unique<FifoPolicy>();
  if (name == "s3fifo") return std::make_unique<S3FifoPolicy>();
  if (name == "sieve") return std::make_unique<SievePolicy>();
  std::string known;
  for (const std::string& each : PolicyNames()) known += (known.empty() ? "" : ", ") + each;
  throw std::invalid_argument("policy is '" + name + "', expected one of " + known);
}

}  // namespace kvstore
