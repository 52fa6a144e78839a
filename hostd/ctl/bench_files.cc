#include "hostd/ctl/bench_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/model/safetensors.h"

namespace slidedp::ctl {
namespace {

// A prime above every vocabulary: frequent tokens lie all over the table.
constexpr int64_t kScatter = 2147483647;

}  // namespace

absl::StatusOr<ScratchFolder> ScratchFolder::Create(const std::string& parent) {
  std::string path =
      absl::StrCat(parent.empty() ? "/tmp" : parent, "/slidedp-bench-XXXXXX");
  if (mkdtemp(path.data()) == nullptr) return ErrnoStatus(errno, path);
  return ScratchFolder(std::move(path));
}

ScratchFolder::~ScratchFolder() {
  if (path_.empty()) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

absl::Status WriteBenchModel(const std::string& folder,
                             const model::Shape& shape) {
  const std::string model = absl::StrCat(folder, "/model");
  if (mkdir(model.c_str(), 0700) != 0) return ErrnoStatus(errno, model);
  return WriteFileAtomically(absl::StrCat(model, "/config.json"),
                             model::ConfigJson(shape));
}

absl::Status WriteRandomTokens(const std::string& path, uint64_t sequences,
                               uint64_t sequence_length, int64_t vocab) {
  const uint64_t n = sequences * sequence_length;
  std::vector<int64_t> offsets = {0, static_cast<int64_t>(n)};
  std::vector<int32_t> ids(n);
  uint64_t state = 0x9e3779b97f4a7c15u;
  const double ranks_log = std::log(static_cast<double>(vocab) + 1);
  for (int32_t& id : ids) {
    // A 64-bit LCG (Knuth); its high half is uniform in [0, 1) up to 2^-32.
    state = state * 6364136223846793005u + 1442695040888963407u;
    const double u = static_cast<double>(state >> 32) * 0x1p-32;
    // exp(u ln(V + 1)), rounded down, is r with probability ln(1 + 1/r) / ln(V
    // + 1): Zipf's law.
    const auto rank = static_cast<int64_t>(std::exp(u * ranks_log)) - 1;
    id = static_cast<int32_t>(std::clamp<int64_t>(rank, 0, vocab - 1) *
                              kScatter % vocab);
  }
  const std::vector<uint8_t> mask(n, 1);
  std::vector<model::TensorEntry> entries = {
      {"doc_offsets", model::DType::kI64, {2}, 0, 0},
      {"input_ids", model::DType::kI32, {static_cast<int64_t>(n)}, 0, 0},
      {"loss_mask", model::DType::kU8, {static_cast<int64_t>(n)}, 0, 0},
  };
  const std::string header =
      model::EncodeSafetensorsHeader(entries, {{"format", "slidedp-dataset"},
                                               {"version", "1"},
                                               {"layout", "stream"},
                                               {"tokenizer_sha256", "none"}});
  SDP_ASSIGN_OR_RETURN(const UniqueFd fd,
                       OpenFile(path, O_WRONLY | O_CREAT | O_EXCL, 0600));
  const struct {
    const void* data;
    size_t bytes;
  } parts[] = {{header.data(), header.size()},
               {offsets.data(), offsets.size() * sizeof(int64_t)},
               {ids.data(), ids.size() * sizeof(int32_t)},
               {mask.data(), mask.size()}};
  uint64_t at = 0;
  for (const auto& part : parts) {
    SDP_RETURN_IF_ERROR(PwriteFully(fd.get(), part.data, part.bytes, at, path));
    at += part.bytes;
  }
  return absl::OkStatus();
}

}  // namespace slidedp::ctl
