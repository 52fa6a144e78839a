#include "worker/data/dataset_file.h"

#include <fcntl.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/fd.h"
#include "common/base/memory.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/safetensors.h"
#include "worker/data/sequence_table.h"

namespace slidedp::data {
namespace {

constexpr char kPrepareAgain[] = "make the dataset again with slidedp-prepare";
constexpr char kTensors[] = "input_ids, loss_mask and doc_offsets";

class Reader {
 public:
  Reader(const std::string& path, UniqueFd fd, model::SafetensorsHeader header)
      : path_(path), fd_(std::move(fd)), header_(std::move(header)) {}

  absl::StatusOr<DatasetFile> Read(int64_t vocab) {
    DatasetFile file;
    SDP_RETURN_IF_ERROR(CheckMetadata(file));
    SDP_RETURN_IF_ERROR(CheckNames());
    SDP_ASSIGN_OR_RETURN(const model::TensorEntry* ids,
                         Entry("input_ids", model::DType::kI32));
    SDP_ASSIGN_OR_RETURN(const model::TensorEntry* mask,
                         Entry("loss_mask", model::DType::kU8));
    SDP_ASSIGN_OR_RETURN(const model::TensorEntry* offsets,
                         Entry("doc_offsets", model::DType::kI64));
    SDP_RETURN_IF_ERROR(CheckLengths(*ids, *mask, *offsets));
    SDP_RETURN_IF_ERROR(CheckMemory(offsets->count() - 1));
    SDP_RETURN_IF_ERROR(ReadTensor(*ids, file.input_ids));
    SDP_RETURN_IF_ERROR(ReadTensor(*mask, file.loss_mask));
    SDP_RETURN_IF_ERROR(ReadTensor(*offsets, file.doc_offsets));
    SDP_RETURN_IF_ERROR(CheckIds(file, vocab));
    SDP_RETURN_IF_ERROR(CheckMask(file));
    SDP_RETURN_IF_ERROR(CheckOffsets(file));
    return file;
  }

 private:
  absl::Status Bad(absl::string_view field, absl::string_view value,
                   absl::string_view problem,
                   absl::string_view remedy = kPrepareAgain) const {
    return InvalidInput(path_, field, value, problem, remedy);
  }
  absl::Status BadAt(absl::string_view tensor, uint64_t position, int64_t value,
                     absl::string_view problem,
                     absl::string_view remedy = kPrepareAgain) const {
    return Bad(absl::StrCat(tensor, "[", position, "]"), absl::StrCat(value),
               problem, remedy);
  }

  // The value of a metadata key that must be there.
  absl::StatusOr<std::string> Metadata(const std::string& key) const {
    const auto found = header_.metadata.find(key);
    if (found == header_.metadata.end()) {
      return Bad(absl::StrCat("metadata ", key), "",
                 "missing: not a SlideDP dataset");
    }
    return found->second;
  }

  absl::Status CheckMetadata(DatasetFile& file) const {
    SDP_ASSIGN_OR_RETURN(std::string format, Metadata("format"));
    if (format != "slidedp-dataset") {
      return Bad("metadata format", format, "not \"slidedp-dataset\"");
    }
    SDP_ASSIGN_OR_RETURN(std::string version, Metadata("version"));
    if (version != "1") {
      return Bad("metadata version", version, "only version 1 is read");
    }
    SDP_ASSIGN_OR_RETURN(std::string layout, Metadata("layout"));
    if (layout != "stream" && layout != "documents") {
      return Bad("metadata layout", layout,
                 "neither \"stream\" nor \"documents\"");
    }
    file.stream = layout == "stream";
    return absl::OkStatus();
  }

  absl::Status CheckNames() const {
    for (const model::TensorEntry& entry : header_.tensors) {
      if (entry.name != "input_ids" && entry.name != "loss_mask" &&
          entry.name != "doc_offsets") {
        return Bad(absl::StrCat("tensor ", entry.name), "",
                   absl::StrCat("unknown: a dataset holds ", kTensors));
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<const model::TensorEntry*> Entry(absl::string_view name,
                                                  model::DType dtype) const {
    const model::TensorEntry* entry = header_.Find(name);
    const std::string field = absl::StrCat("tensor ", name);
    if (entry == nullptr) {
      return Bad(field, "",
                 absl::StrCat("missing: a dataset holds ", kTensors));
    }
    if (entry->dtype != dtype) {
      return Bad(absl::StrCat(field, " dtype"), model::DTypeName(entry->dtype),
                 absl::StrCat("must be ", model::DTypeName(dtype)));
    }
    if (entry->shape.size() != 1) {
      return Bad(absl::StrCat(field, " shape"),
                 absl::StrCat("[", absl::StrJoin(entry->shape, ", "), "]"),
                 "must have one dimension");
    }
    return entry;
  }

  absl::Status CheckLengths(const model::TensorEntry& ids,
                            const model::TensorEntry& mask,
                            const model::TensorEntry& offsets) const {
    if (ids.count() == 0) {
      return Bad("tensor input_ids", "", "no token in it");
    }
    if (mask.count() != ids.count()) {
      return Bad(
          "tensor loss_mask shape", absl::StrCat("[", mask.count(), "]"),
          absl::StrCat("must be that of input_ids, [", ids.count(), "]"));
    }
    if (offsets.count() < 2 || offsets.count() - 1 > ids.count()) {
      return Bad("tensor doc_offsets shape",
                 absl::StrCat("[", offsets.count(), "]"),
                 absl::StrCat("must hold one offset more than documents, for ",
                              "1 to ", ids.count(), " documents"));
    }
    return absl::OkStatus();
  }

  // A sparse file of any size is cheap to make; reading it must not take the
  // host down.
  absl::Status CheckMemory(uint64_t documents) const {
    SDP_ASSIGN_OR_RETURN(const MemoryRoom room, AvailableMemory());
    const uint64_t file_bytes = header_.file_bytes;
    if (file_bytes <= room.bytes &&
        documents <= (room.bytes - file_bytes) / kTableBytesPerDocument) {
      return absl::OkStatus();
    }
    return absl::ResourceExhaustedError(absl::StrCat(
        path_, ": the dataset takes ", FormatBytes(file_bytes), " and up to ",
        kTableBytesPerDocument, " bytes for each of ", documents, " documents",
        " of memory in each rank, but ", room.limit, " leaves ",
        FormatBytes(room.bytes), "; split the dataset or free memory"));
  }

  template <typename T>
  absl::Status ReadTensor(const model::TensorEntry& entry,
                          std::vector<T>& out) const {
    out.resize(entry.count());
    return PreadFully(fd_.get(), out.data(), out.size() * sizeof(T),
                      entry.begin, path_);
  }

  absl::Status CheckIds(const DatasetFile& file, int64_t vocab) const {
    const auto bad =
        std::find_if(file.input_ids.begin(), file.input_ids.end(),
                     [&](int32_t id) { return id < 0 || id >= vocab; });
    if (bad == file.input_ids.end()) return absl::OkStatus();
    return BadAt("input_ids", bad - file.input_ids.begin(), *bad,
                 absl::StrCat("not a token of the model, whose vocabulary has ",
                              vocab, " entries"),
                 "make the dataset with this model's own tokenizer");
  }

  absl::Status CheckMask(const DatasetFile& file) const {
    const auto bad = std::find_if(file.loss_mask.begin(), file.loss_mask.end(),
                                  [](uint8_t mask) { return mask > 1; });
    if (bad == file.loss_mask.end()) return absl::OkStatus();
    return BadAt("loss_mask", bad - file.loss_mask.begin(), *bad,
                 "neither 0 nor 1");
  }

  absl::Status CheckOffsets(const DatasetFile& file) const {
    const std::vector<int64_t>& offsets = file.doc_offsets;
    const int64_t tokens = static_cast<int64_t>(file.input_ids.size());
    if (offsets.front() != 0) {
      return BadAt("doc_offsets", 0, offsets.front(), "the first must be 0");
    }
    for (size_t i = 1; i < offsets.size(); ++i) {
      if (offsets[i] <= offsets[i - 1]) {
        return BadAt(
            "doc_offsets", i, offsets[i],
            absl::StrCat("not above the offset before it, ", offsets[i - 1]));
      }
    }
    if (offsets.back() != tokens) {
      return BadAt(
          "doc_offsets", offsets.size() - 1, offsets.back(),
          absl::StrCat("the last must be the number of tokens, ", tokens));
    }
    return absl::OkStatus();
  }

  const std::string& path_;
  UniqueFd fd_;
  model::SafetensorsHeader header_;
};

}  // namespace

absl::StatusOr<DatasetFile> ReadDatasetFile(const std::string& path,
                                            int64_t vocab) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_NONBLOCK));
  SDP_ASSIGN_OR_RETURN(model::SafetensorsHeader header,
                       model::ReadSafetensorsHeader(fd.get(), path));
  return Reader(path, std::move(fd), std::move(header)).Read(vocab);
}

}  // namespace slidedp::data
