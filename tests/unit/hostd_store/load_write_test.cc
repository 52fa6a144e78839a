// Loading a model into the planes and writing it back.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/store/host_state.h"
#include "hostd/store/pieces.h"
#include "hostd/store/split.h"
#include "tests/testing/half.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::hostd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// A model folder on disk and its source and host state.
class StoreTest : public ::testing::Test {
 protected:
  void Make(testing::TinyModelOptions options) {
    options.vocab = 1100;  // the embedding is more than one piece
    testing::WriteTinyModel(folder_.path(), options);
    layout_ = model::MakeStateLayout(testing::TinyConfig(options));
    policy::Plan plan;
    plan.h2d_chunk_bytes = plan.d2h_chunk_bytes = 65536;
    plan.update_mode = policy::UpdateMode::kEager;
    plan.ring_chunks = 2;
    plan.update_threads = 3;
    ASSERT_OK_AND_ASSIGN(state_, HostState::Create("test", layout_, plan));
    Open();
  }
  void Open() {
    auto source = model::OpenModelFolder(folder_.path());
    ASSERT_OK(source);
    source_ = std::make_unique<model::TensorSource>(std::move(source).value());
  }
  // Overwrites one element in the file.
  void Patch(const std::string& tensor, uint64_t element, const void* value) {
    const model::TensorSource::Ref ref = source_->Find(tensor);
    ASSERT_NE(ref.entry, nullptr) << tensor;
    const uint64_t bytes = model::DTypeBytes(ref.entry->dtype);
    ASSERT_OK_AND_ASSIGN(UniqueFd file,
                         OpenFile(folder_.Sub(ref.file->name), O_WRONLY));
    ASSERT_OK(PwriteFully(file.get(), value, bytes,
                          ref.entry->begin + element * bytes, "patch"));
  }
  void PatchFloat(const std::string& tensor, uint64_t element, float value) {
    Patch(tensor, element, &value);
  }
  // Copies of the source's files, with every tensor's bytes zeroed.
  std::vector<UniqueFd> BlankCopies() {
    std::vector<UniqueFd> copies;
    for (const model::SourceFile& file : source_->files()) {
      std::string bytes = Bytes(file.fd.get());
      for (const model::TensorEntry& tensor : file.header.tensors) {
        std::fill(bytes.begin() + static_cast<int64_t>(tensor.begin),
                  bytes.begin() + static_cast<int64_t>(tensor.end), '\0');
      }
      const std::string path =
          folder_.Write(absl::StrCat("copy-", file.name), bytes);
      copies.push_back(OpenFile(path, O_RDWR).value());
    }
    return copies;
  }
  static std::string Bytes(int fd) {
    std::string bytes(RegularFileBytes(fd, "file").value(), '\0');
    EXPECT_OK(PreadFully(fd, bytes.data(), bytes.size(), 0, "file"));
    return bytes;
  }
  static std::vector<int> Descriptors(const std::vector<UniqueFd>& files) {
    std::vector<int> fds;
    for (const UniqueFd& file : files) fds.push_back(file.get());
    return fds;
  }

  testing::TempFolder folder_;
  model::StateLayout layout_;
  std::unique_ptr<HostState> state_;
  std::unique_ptr<model::TensorSource> source_;
};

class RoundTripTest : public StoreTest,
                      public ::testing::WithParamInterface<
                          std::tuple<model::DType, bool, int>> {
 protected:
  testing::TinyModelOptions Options() const {
    testing::TinyModelOptions options;
    std::tie(options.dtype, options.tied, options.shards) = GetParam();
    options.extra_head = options.tied && options.shards > 1;
    options.unaligned = options.shards > 1;
    return options;
  }
};

TEST_P(RoundTripTest, PlanesHoldEveryValueExactlyAndPaddingStaysZero) {
  Make(Options());
  ASSERT_OK(LoadParameters(*source_, *state_));
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const model::Unit& unit = layout_.units[u];
    const PlaneSpan p = state_->planes(static_cast<int>(u), 0, unit.count);
    std::vector<float> expected(unit.count);
    for (const model::Tensor& tensor : unit.tensors) {
      ASSERT_OK(model::ReadAsFloat(source_->Find(tensor.name), 0, tensor.count,
                                   expected.data() + tensor.offset));
    }
    for (uint64_t i = 0; i < unit.count; ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(JoinFloat(p.hi[i], p.lo[i])),
                std::bit_cast<uint32_t>(expected[i]))
          << u << " " << i;
      ASSERT_EQ(p.m[i], 0.0f);
      ASSERT_EQ(p.v[i], 0.0f);
    }
  }
}

TEST_P(RoundTripTest, WritingWhatWasLoadedGivesTheSameFiles) {
  Make(Options());
  ASSERT_OK(LoadParameters(*source_, *state_));
  const std::vector<UniqueFd> copies = BlankCopies();
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> warnings,
                       WriteParameters(*source_, *state_, Descriptors(copies)));
  EXPECT_THAT(warnings, IsEmpty());
  for (size_t i = 0; i < copies.size(); ++i) {
    EXPECT_TRUE(Bytes(copies[i].get()) == Bytes(source_->files()[i].fd.get()))
        << source_->files()[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RoundTripTest,
    ::testing::Combine(::testing::Values(model::DType::kBf16,
                                         model::DType::kF16,
                                         model::DType::kF32),
                       ::testing::Bool(), ::testing::Values(1, 3)));

TEST_F(StoreTest, WritesTheMasterInTheSourcesDtype) {
  for (model::DType dtype :
       {model::DType::kBf16, model::DType::kF16, model::DType::kF32}) {
    testing::TinyModelOptions options;
    options.dtype = dtype;
    Make(options);
    ASSERT_OK(LoadParameters(*source_, *state_));
    // Values that neither BF16 nor F16 holds exactly.
    const model::Tensor& tensor = layout_.units[1].tensor(model::Role::kGate);
    const PlaneSpan p = state_->planes(1, tensor.offset, tensor.count);
    std::vector<float> master(tensor.count);
    for (uint64_t i = 0; i < tensor.count; ++i) {
      master[i] = 1.0f / static_cast<float>(3 + i);
      SplitFloat(master[i], p.hi[i], p.lo[i]);
    }
    const std::vector<UniqueFd> copies = BlankCopies();
    ASSERT_OK(WriteParameters(*source_, *state_, Descriptors(copies)));
    const model::TensorEntry& entry = *source_->Find(tensor.name).entry;
    const std::string bytes = Bytes(copies[0].get());
    for (uint64_t i = 0; i < tensor.count; ++i) {
      const char* at =
          bytes.data() + entry.begin + i * model::DTypeBytes(dtype);
      if (dtype == model::DType::kF32) {
        float value;
        std::memcpy(&value, at, sizeof(value));
        ASSERT_EQ(value, master[i]);
      } else {
        uint16_t value;
        std::memcpy(&value, at, sizeof(value));
        ASSERT_EQ(value, dtype == model::DType::kBf16
                             ? FloatToBf16Away(master[i])
                             : testing::FloatToHalf(master[i]));
      }
    }
  }
}

TEST_F(StoreTest, F16SaturatesWithAWarningThatNamesTheTensor) {
  testing::TinyModelOptions options;
  options.dtype = model::DType::kF16;
  Make(options);
  ASSERT_OK(LoadParameters(*source_, *state_));
  const model::Tensor& tensor = layout_.units[2].tensor(model::Role::kDown);
  const PlaneSpan p = state_->planes(2, tensor.offset, tensor.count);
  SplitFloat(1e6f, p.hi[0], p.lo[0]);
  SplitFloat(-65520.0f, p.hi[5], p.lo[5]);
  const std::vector<UniqueFd> copies = BlankCopies();
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> warnings,
                       WriteParameters(*source_, *state_, Descriptors(copies)));
  ASSERT_THAT(warnings, SizeIs(1));
  EXPECT_THAT(warnings[0], AllOf(HasSubstr(tensor.name), HasSubstr("2 values"),
                                 HasSubstr("65504")));
  const std::string bytes = Bytes(copies[0].get());
  const model::TensorEntry& entry = *source_->Find(tensor.name).entry;
  uint16_t first, sixth;
  std::memcpy(&first, bytes.data() + entry.begin, 2);
  std::memcpy(&sixth, bytes.data() + entry.begin + 10, 2);
  EXPECT_EQ(first, 0x7bff);
  EXPECT_EQ(sixth, 0xfbff);
}

TEST_F(StoreTest, ValuesThatThePlanesCannotHoldNameTensorAndElement) {
  const struct {
    float value;
    const char* problem;
  } cases[] = {
      {std::nanf(""), "not a finite number"},
      {-std::numeric_limits<float>::infinity(), "not a finite number"},
      {std::bit_cast<float>(0x7f7f8000u), "rounds to infinity in bfloat16"},
  };
  for (const auto& c : cases) {
    testing::TinyModelOptions options;
    options.dtype = model::DType::kF32;
    Make(options);
    // In the embedding's second piece; a later tensor is bad as well, and the
    // first one in tensor order is named whatever the threads do.
    const std::string name = "model.embed_tokens.weight";
    PatchFloat(name, kPieceElements + 3, c.value);
    PatchFloat("model.norm.weight", 0, c.value);
    Open();
    EXPECT_THAT(
        LoadParameters(*source_, *state_),
        testing::StatusIs(
            absl::StatusCode::kInvalidArgument,
            AllOf(HasSubstr("model.safetensors"),
                  HasSubstr(absl::StrCat(name, "[", kPieceElements + 3, "]")),
                  HasSubstr(c.problem))));
  }
}

TEST_F(StoreTest, LargestFloatThatHasAFiniteHiLoads) {
  testing::TinyModelOptions options;
  options.dtype = model::DType::kF32;
  Make(options);
  const float largest = std::bit_cast<float>(0x7f7f7fffu);
  PatchFloat("model.norm.weight", 1, -largest);
  Open();
  ASSERT_OK(LoadParameters(*source_, *state_));
  const int head = layout_.head_unit();
  const model::Tensor& norm =
      layout_.units[head].tensor(model::Role::kFinalNorm);
  const PlaneSpan p = state_->planes(head, norm.offset + 1, 1);
  EXPECT_EQ(JoinFloat(p.hi[0], p.lo[0]), -largest);
}

TEST_F(StoreTest, InfinityInF16AndBf16IsRefused) {
  const struct {
    model::DType dtype;
    uint16_t bits;
  } cases[] = {{model::DType::kBf16, 0x7f80},
               {model::DType::kBf16, 0xffc1},
               {model::DType::kF16, 0xfc00},
               {model::DType::kF16, 0x7e00}};
  for (const auto& c : cases) {
    testing::TinyModelOptions options;
    options.dtype = c.dtype;
    Make(options);
    Patch("model.layers.1.mlp.up_proj.weight", 17, &c.bits);
    Open();
    EXPECT_THAT(
        LoadParameters(*source_, *state_),
        testing::StatusIs(absl::StatusCode::kInvalidArgument,
                          HasSubstr("model.layers.1.mlp.up_proj.weight[17]")));
  }
}

TEST_F(StoreTest, TiedHeadInTheFileMustEqualTheEmbedding) {
  testing::TinyModelOptions options;
  options.tied = true;
  options.extra_head = true;
  options.dtype = model::DType::kF32;
  Make(options);
  ASSERT_OK(LoadParameters(*source_, *state_));
  PatchFloat("lm_head.weight", kPieceElements + 9, 42.0f);
  Open();
  EXPECT_THAT(LoadParameters(*source_, *state_),
              testing::StatusIs(
                  absl::StatusCode::kInvalidArgument,
                  AllOf(HasSubstr(absl::StrCat("lm_head.weight[",
                                               kPieceElements + 9, "]")),
                        HasSubstr("42"), HasSubstr("model.embed_tokens.weight"),
                        HasSubstr("tie_word_embeddings"))));
}

TEST_F(StoreTest, TiedHeadIsWrittenFromTheEmbedding) {
  testing::TinyModelOptions options;
  options.tied = true;
  options.extra_head = true;
  Make(options);
  ASSERT_OK(LoadParameters(*source_, *state_));
  const model::Tensor& table = layout_.units[0].tensor(model::Role::kEmbedding);
  const PlaneSpan p = state_->planes(0, table.offset, table.count);
  SplitFloat(-7.5f, p.hi[100], p.lo[100]);
  const std::vector<UniqueFd> copies = BlankCopies();
  ASSERT_OK(WriteParameters(*source_, *state_, Descriptors(copies)));
  const std::string bytes = Bytes(copies[0].get());
  for (const char* name : {"lm_head.weight", "model.embed_tokens.weight"}) {
    const model::TensorEntry& entry = *source_->Find(name).entry;
    EXPECT_EQ(std::memcmp(bytes.data() + entry.begin, p.hi, 2 * table.count), 0)
        << name;
  }
}

TEST_F(StoreTest, ShortFileIsAnErrorNotARead) {
  Make({});
  ASSERT_OK_AND_ASSIGN(UniqueFd file,
                       OpenFile(folder_.Sub("model.safetensors"), O_WRONLY));
  ASSERT_EQ(ftruncate(file.get(), 4096), 0);
  EXPECT_THAT(LoadParameters(*source_, *state_),
              ::testing::Not(testing::IsOk()));
}

TEST_F(StoreTest, WritingNeedsAFilePerSourceFile) {
  testing::TinyModelOptions options;
  options.shards = 3;
  Make(options);
  EXPECT_THAT(WriteParameters(*source_, *state_, {1}),
              testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("3 files")));
}

TEST_F(StoreTest, LoadingAndWritingCanBeStopped) {
  Make({});
  const std::atomic<bool> stop = true;
  EXPECT_THAT(LoadParameters(*source_, *state_, &stop),
              testing::StatusIs(absl::StatusCode::kCancelled));
  const std::vector<UniqueFd> copies = BlankCopies();
  EXPECT_THAT(WriteParameters(*source_, *state_, Descriptors(copies), &stop),
              testing::StatusIs(absl::StatusCode::kCancelled));
}

}  // namespace
}  // namespace slidedp::hostd
