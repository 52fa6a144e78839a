#include "policy/fill_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "policy/gpu_memory.h"
#include "policy/invalid.h"

namespace slidedp::policy {
namespace {

// Fewer rows than this make a matrix product slow.
constexpr int64_t kLeastHeadChunkTokens = 512;

// One value for all layers, or one for each.
template <typename T>
absl::Status Spread(absl::string_view field, const std::vector<T>& chosen,
                    size_t layers, std::vector<T>& values) {
  if (chosen.size() != 1 && chosen.size() != layers) {
    return InvalidInput("", field, absl::StrCat(chosen.size(), " values"),
                        absl::StrCat("the model has ", layers, " layers"),
                        "give one value for all, or one for each");
  }
  values = chosen;
  if (chosen.size() == 1) values.assign(layers, chosen[0]);
  return absl::OkStatus();
}

absl::Status CheckKeptLayers(const Problem& problem, int layers) {
  if (!problem.kept_layers) return absl::OkStatus();
  if (*problem.kept_layers > layers) {
    return Invalid("tuning.kept_layers", *problem.kept_layers,
                   absl::StrCat("the model has ", layers, " layers"),
                   "keep at most that many");
  }
  if (*problem.kept_layers < 0) {
    return Invalid("tuning.kept_layers", *problem.kept_layers, "out of range",
                   absl::StrCat("choose 0 to ", layers));
  }
  if (!problem.keep.empty()) {
    return Invalid("tuning.kept_layers", *problem.kept_layers,
                   "tuning.keep says already what each layer keeps",
                   "leave one of the two out");
  }
  return absl::OkStatus();
}

class Filler {
 public:
  Filler(const Problem& problem, const model::StateLayout& layout, Plan& plan)
      : problem_(problem),
        layout_(layout),
        plan_(plan),
        layers_(static_cast<int>(problem.config.layers)),
        choose_keep_(problem.keep.empty()),
        choose_offload_(problem.offload_permille.empty()) {}

  absl::Status Run() {
    SDP_RETURN_IF_ERROR(CheckKeptLayers(problem_, layers_));
    if (!choose_keep_) {
      SDP_RETURN_IF_ERROR(
          Spread("tuning.keep", problem_.keep, layers_, plan_.keep));
    }
    for (const uint16_t permille : problem_.offload_permille) {
      if (permille > kOffloadAll) {
        return Invalid("tuning.offload", permille, "thousandths, out of range",
                       "choose a share of 0 to 1");
      }
    }
    Offload(0);
    if (!choose_offload_) {
      SDP_RETURN_IF_ERROR(Spread("tuning.offload", problem_.offload_permille,
                                 layers_, plan_.offload_permille));
    }
    if (budget() == 0) {
      Keep(problem_.kept_layers.value_or(0));
      return absl::OkStatus();
    }
    Keep(0);
    if (!MakeFit()) return TooLarge();
    if (choose_keep_) SDP_RETURN_IF_ERROR(KeepWhatFits());
    FillWindow();
    return absl::OkStatus();
  }

 private:
  uint64_t budget() const { return problem_.device_memory_bytes; }
  uint64_t Needed() const {
    return GpuBytes(DeviceBuffers(problem_.config, layout_, plan_));
  }
  bool Fits() const { return Needed() <= budget(); }

  // The last `count` layers.
  void Keep(int count) {
    if (!choose_keep_) return;
    plan_.keep.assign(layers_, problem_.keep_mask);
    std::fill(plan_.keep.end() - count, plan_.keep.end(), kKeepAll);
  }
  // The first `count` layers.
  void Offload(int count) {
    if (!choose_offload_) return;
    offloaded_ = count;
    plan_.offload_permille.assign(layers_, 0);
    std::fill_n(plan_.offload_permille.begin(), count, kOffloadAll);
  }

  // What costs least time comes first.
  bool MakeFit() {
    if (Fits()) return true;
    const uint64_t without = Needed();
    const int64_t head_chunk_tokens = plan_.head_chunk_tokens;
    Offload(layers_);
    // The slots of few layers take more than the layers.
    const bool offload = choose_offload_ && Needed() < without;
    if (!offload) Offload(0);
    while (!Fits()) {
      if (problem_.window_slots == 0 && plan_.window_slots > 2) {
        --plan_.window_slots;
      } else if (problem_.head_chunk_tokens == 0 &&
                 plan_.head_chunk_tokens >= 2 * kLeastHeadChunkTokens) {
        plan_.head_chunk_tokens /= 2;
      } else if (problem_.grad_slots == 0 && plan_.grad_slots > 1) {
        --plan_.grad_slots;
      } else if (problem_.window_slots == 0 && plan_.window_slots > 1) {
        --plan_.window_slots;
      } else {
        return false;
      }
    }
    // What came after the head's chunks may have left room for them.
    while (plan_.head_chunk_tokens < head_chunk_tokens) {
      const int64_t smaller = plan_.head_chunk_tokens;
      plan_.head_chunk_tokens = std::min(2 * smaller, head_chunk_tokens);
      if (Fits()) continue;
      plan_.head_chunk_tokens = smaller;
      break;
    }
    for (int count = 0; offload && count <= layers_; ++count) {
      Offload(count);
      if (Fits()) break;
    }
    return true;
  }

  absl::Status TooLarge() const {
    const std::string needs =
        absl::StrCat("needs ", FormatBytes(Needed()), " of device memory");
    const std::string allowed =
        absl::StrCat("; ", FormatBytes(budget()), " may be used");
    if (!choose_keep_) {
      return InvalidInput("", "tuning.keep",
                          absl::StrCat("of ", layers_, " layers"),
                          absl::StrCat(needs, allowed),
                          "keep less, or offload more (tuning.offload)");
    }
    return Invalid("micro_batch_size", problem_.micro_batch_size,
                   absl::StrCat(needs, " even if no layer is kept", allowed),
                   "use a smaller one, a shorter sequence_length, a smaller "
                   "tuning.keep_mask or fewer tuning.window_slots");
  }

  absl::Status KeepWhatFits() {
    // More layers take more memory: find the most that fit.
    int most = layers_ - offloaded_;
    for (; most > 0; --most) {
      Keep(most);
      if (Fits()) break;
    }
    if (problem_.kept_layers && *problem_.kept_layers > most) {
      Keep(*problem_.kept_layers);
      return Invalid(
          "tuning.kept_layers", *problem_.kept_layers,
          absl::StrCat("needs ", FormatBytes(Needed()), " of device memory; ",
                       FormatBytes(budget()), " may be used"),
          absl::StrCat("keep at most ", most, ", or leave it out"));
    }
    Keep(problem_.kept_layers.value_or(most));
    if (problem_.kept_layers || problem_.keep_mask != 0) {
      return absl::OkStatus();
    }
    int next = layers_ - most - 1;
    for (const uint8_t mask : {kKeepSelective, Bit(Segment::kAttention)}) {
      for (; next >= offloaded_; --next) {
        plan_.keep[next] = mask;
        if (Fits()) continue;
        plan_.keep[next] = 0;
        break;
      }
    }
    return absl::OkStatus();
  }

  void FillWindow() {
    if (problem_.window_slots != 0) return;
    const int least = plan_.window_slots;
    for (plan_.window_slots = layers_; plan_.window_slots > least;
         --plan_.window_slots) {
      if (Fits()) return;
    }
  }

  const Problem& problem_;
  const model::StateLayout& layout_;
  Plan& plan_;
  const int layers_;
  const bool choose_keep_, choose_offload_;
  int offloaded_ = 0;
};

}  // namespace

absl::Status FillMemory(const Problem& problem,
                        const model::StateLayout& layout, Plan& plan) {
  return Filler(problem, layout, plan).Run();
}

}  // namespace slidedp::policy
