#include <sys/stat.h>

#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/unit/worker_data/dataset_fixture.h"

namespace slidedp::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Ints = std::vector<int32_t>;

struct Sequence {
  Ints ids, labels;
};
Sequence Get(const Dataset& dataset, uint64_t i) {
  Sequence s{Ints(dataset.sequence_length(), -7),
             Ints(dataset.sequence_length(), -7)};
  dataset.Fill(i, s.ids.data(), s.labels.data());
  return s;
}

TEST_F(DatasetTest, StreamIsCutIntoSequencesAndItsTailDropped) {
  const auto dataset = Open(CountingStream(11).Encode(), 4);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_EQ(dataset->sequences(), 2u);
  EXPECT_EQ(dataset->tokens(), 11u);
  EXPECT_EQ(dataset->valid_tokens(), 6u);
  EXPECT_EQ(Get(*dataset, 0).ids, Ints({0, 1, 2, 3}));
  EXPECT_EQ(Get(*dataset, 0).labels, Ints({1, 2, 3, -1}));
  EXPECT_EQ(Get(*dataset, 1).ids, Ints({4, 5, 6, 7}));
  EXPECT_EQ(Get(*dataset, 1).labels, Ints({5, 6, 7, -1}));
}

TEST_F(DatasetTest, MaskOfTheNextTokenDecidesTheLabel) {
  const RawDataset raw({5, 6, 7, 8, 9, 10}, {1, 0, 1, 1, 1, 0}, {0, 6},
                       "stream");
  const auto dataset = Open(raw.Encode(), 3);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_EQ(Get(*dataset, 0).labels, Ints({-1, 7, -1}));
  // Token 3 (id 8) is masked in, but no position of its sequence precedes it.
  EXPECT_EQ(Get(*dataset, 1).labels, Ints({9, -1, -1}));
  EXPECT_EQ(dataset->LabelCount(0), 1u);
  EXPECT_EQ(dataset->LabelCount(1), 1u);
  EXPECT_EQ(dataset->valid_tokens(), 2u);
}

TEST_F(DatasetTest, StreamSequencesCrossDocuments) {
  const RawDataset raw({1, 2, 3, 4}, {1, 1, 1, 1}, {0, 1, 4}, "stream");
  const auto dataset = Open(raw.Encode(), 4);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_EQ(Get(*dataset, 0).labels, Ints({2, 3, 4, -1}));
}

TEST_F(DatasetTest, DocumentsAreSplitAndPadded) {
  const RawDataset raw({1, 2, 3, 4, 5, 6, 7, 8, 9}, std::vector<uint8_t>(9, 1),
                       {0, 2, 9}, "documents");
  const auto dataset = Open(raw.Encode(), 4);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  ASSERT_EQ(dataset->sequences(), 3u);
  EXPECT_EQ(Get(*dataset, 0).ids, Ints({1, 2, 0, 0}));
  EXPECT_EQ(Get(*dataset, 1).ids, Ints({3, 4, 5, 6}));
  // Both parts are documents of their own: 7 is nobody's label.
  EXPECT_EQ(Get(*dataset, 1).labels, Ints({4, 5, 6, -1}));
  EXPECT_EQ(Get(*dataset, 2).ids, Ints({7, 8, 9, 0}));
  EXPECT_EQ(Get(*dataset, 2).labels, Ints({8, 9, -1, -1}));
  EXPECT_EQ(dataset->used_tokens(), 9u);
  EXPECT_EQ(dataset->documents_per_sequence(), 0);
}

TEST_F(DatasetTest, TruncatedDocumentsAreCutAndPadded) {
  const RawDataset raw({1, 2, 3, 4, 5, 6, 7, 8}, {1, 1, 1, 1, 1, 1, 1, 1},
                       {0, 2, 7, 8}, "documents");
  SequenceOptions options;
  options.long_documents = LongDocuments::kTruncate;
  const auto dataset = Open(raw.Encode(), 4, 1000, options);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  ASSERT_EQ(dataset->sequences(), 3u);
  EXPECT_EQ(Get(*dataset, 0).ids, Ints({1, 2, 0, 0}));
  EXPECT_EQ(Get(*dataset, 0).labels, Ints({2, -1, -1, -1}));
  // The token beyond the cut (7) is no label.
  EXPECT_EQ(Get(*dataset, 1).ids, Ints({3, 4, 5, 6}));
  EXPECT_EQ(Get(*dataset, 1).labels, Ints({4, 5, 6, -1}));
  EXPECT_EQ(Get(*dataset, 2).ids, Ints({8, 0, 0, 0}));
  EXPECT_EQ(Get(*dataset, 2).labels, Ints({-1, -1, -1, -1}));
  EXPECT_EQ(dataset->LabelCount(2), 0u);
  EXPECT_EQ(dataset->valid_tokens(), 4u);
  EXPECT_EQ(dataset->used_tokens(), 7u);
  EXPECT_EQ(dataset->tokens(), 8u);
}

TEST_F(DatasetTest, PackedDocumentsHaveNoLabelAcrossThem) {
  const RawDataset raw({1, 2, 3, 4, 5, 6}, {1, 1, 1, 1, 0, 1}, {0, 3, 6},
                       "documents");
  SequenceOptions options;
  options.packing = true;
  const auto dataset = Open(raw.Encode(), 7, 1000, options);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  ASSERT_EQ(dataset->sequences(), 1u);
  const Sequence got = Get(*dataset, 0);
  // Which of two equally long documents comes first is the seed's.
  if (got.ids[0] == 1) {
    EXPECT_EQ(got.ids, Ints({1, 2, 3, 4, 5, 6, 0}));
    EXPECT_EQ(got.labels, Ints({2, 3, -1, -1, 6, -1, -1}));
  } else {
    EXPECT_EQ(got.ids, Ints({4, 5, 6, 1, 2, 3, 0}));
    EXPECT_EQ(got.labels, Ints({-1, 6, -1, 2, 3, -1, -1}));
  }
  EXPECT_EQ(dataset->valid_tokens(), 3u);
  EXPECT_EQ(dataset->documents_per_sequence(), 3);  // the padding is one
  std::vector<int32_t> offsets = {7};
  dataset->AppendDocuments(0, 14, offsets);
  EXPECT_EQ(offsets, Ints({7, 14, 17, 20}));
}

TEST_F(DatasetTest, ValidTokensAreTheLabelsThatFillGives) {
  std::mt19937 random(3);
  std::vector<uint8_t> mask(501);
  for (uint8_t& value : mask) value = random() % 2;
  for (const std::string layout : {"stream", "documents"}) {
    const RawDataset raw(Counting(501), mask, {0, 3, 40, 41, 501}, layout);
    const auto dataset = Open(raw.Encode(), 17);
    ASSERT_TRUE(dataset.ok()) << dataset.status();
    uint64_t total = 0;
    for (uint64_t i = 0; i < dataset->sequences(); ++i) {
      uint64_t labels = 0;
      for (const int32_t label : Get(*dataset, i).labels) labels += label >= 0;
      EXPECT_EQ(labels, dataset->LabelCount(i));
      total += labels;
    }
    EXPECT_EQ(total, dataset->valid_tokens());
  }
}

// One broken file a line, and what its error must name.
struct Broken {
  const char* name;
  void (*edit)(RawDataset&);
  std::vector<std::string> named;
};

template <typename T>
void Put(RawDataset& raw, int tensor, int64_t position, T value) {
  std::string& bytes = raw.tensors[tensor].bytes;
  bytes.replace(position * sizeof(T), sizeof(T),
                reinterpret_cast<const char*>(&value), sizeof(T));
}

const Broken kBroken[] = {
    {"token beyond vocabulary",
     [](RawDataset& raw) { Put<int32_t>(raw, 0, 7, 1000); },
     {"input_ids[7] = 1000", "1000 entries", "tokenizer"}},
    {"negative token",
     [](RawDataset& raw) { Put<int32_t>(raw, 0, 39, -5); },
     {"input_ids[39] = -5"}},
    {"mask of 2",
     [](RawDataset& raw) { Put<uint8_t>(raw, 1, 3, 2); },
     {"loss_mask[3] = 2", "neither 0 nor 1"}},
    {"all labels masked",
     [](RawDataset& raw) { raw.tensors[1].bytes.assign(40, '\0'); },
     {"loss_mask", "no label", "sequence_length"}},
    // The first token of a sequence is no label of anything.
    {"labels only where no position precedes them",
     [](RawDataset& raw) {
       raw.tensors[1].bytes.assign(40, '\0');
       for (int i = 0; i < 40; i += 4) raw.tensors[1].bytes[i] = 1;
     },
     {"loss_mask", "no label"}},
    {"first offset not 0",
     [](RawDataset& raw) { Put<int64_t>(raw, 2, 0, 1); },
     {"doc_offsets[0] = 1"}},
    {"negative offset",
     [](RawDataset& raw) { Put<int64_t>(raw, 2, 0, -1); },
     {"doc_offsets[0] = -1"}},
    {"descending offsets",
     [](RawDataset& raw) { Put<int64_t>(raw, 2, 1, 30); },
     {"doc_offsets[2] = 20", "30"}},
    {"empty document",
     [](RawDataset& raw) { Put<int64_t>(raw, 2, 1, 20); },
     {"doc_offsets[2] = 20"}},
    {"last offset short",
     [](RawDataset& raw) { Put<int64_t>(raw, 2, 3, 39); },
     {"doc_offsets[3] = 39", "40"}},
    {"last offset beyond",
     [](RawDataset& raw) { Put<int64_t>(raw, 2, 3, INT64_MAX); },
     {"doc_offsets[3] = 9223372036854775807"}},
    {"another format",
     [](RawDataset& raw) { raw.metadata["format"] = "pt"; },
     {"metadata format = pt"}},
    {"no format",
     [](RawDataset& raw) { raw.metadata.erase("format"); },
     {"metadata format", "missing"}},
    {"no metadata",
     [](RawDataset& raw) { raw.metadata.clear(); },
     {"metadata format", "missing"}},
    {"newer version",
     [](RawDataset& raw) { raw.metadata["version"] = "2"; },
     {"metadata version = 2"}},
    {"unknown layout",
     [](RawDataset& raw) { raw.metadata["layout"] = "packed"; },
     {"metadata layout = packed"}},
    {"no mask",
     [](RawDataset& raw) { raw.tensors.erase(raw.tensors.begin() + 1); },
     {"tensor loss_mask", "missing"}},
    {"no tensors",
     [](RawDataset& raw) { raw.tensors.clear(); },
     {"tensor input_ids", "missing"}},
    {"unknown tensor",
     [](RawDataset& raw) {
       raw.tensors.push_back({"position_ids", model::DType::kU8, {1}, "x"});
     },
     {"tensor position_ids", "unknown"}},
    {"ids of another type",
     [](RawDataset& raw) {
       raw.tensors[0].dtype = model::DType::kI64;
       raw.tensors[0].bytes.resize(320, '\0');
     },
     {"tensor input_ids dtype = I64", "I32"}},
    {"ids in two dimensions",
     [](RawDataset& raw) {
       raw.tensors[0].shape = {10, 4};
     },
     {"tensor input_ids shape = [10, 4]", "one dimension"}},
    {"scalar offsets",
     [](RawDataset& raw) {
       raw.tensors[2].shape = {};
       raw.tensors[2].bytes.resize(8);
     },
     {"tensor doc_offsets shape = []"}},
    {"mask of another length",
     [](RawDataset& raw) {
       raw.tensors[1].shape = {39};
       raw.tensors[1].bytes.resize(39);
     },
     {"tensor loss_mask shape = [39]", "[40]"}},
    {"no token",
     [](RawDataset& raw) {
       for (int i = 0; i < 2; ++i) {
         raw.tensors[i].shape = {0};
         raw.tensors[i].bytes.clear();
       }
     },
     {"tensor input_ids", "no token"}},
    {"one offset",
     [](RawDataset& raw) {
       raw.tensors[2].shape = {1};
       raw.tensors[2].bytes.resize(8);
     },
     {"tensor doc_offsets shape = [1]"}},
    {"more documents than tokens",
     [](RawDataset& raw) {
       raw.tensors[2].shape = {42};
       raw.tensors[2].bytes.resize(42 * 8);
     },
     {"tensor doc_offsets shape = [42]", "40"}},
};

RawDataset Good() {
  return RawDataset(Counting(40), std::vector<uint8_t>(40, 1), {0, 10, 20, 40},
                    "stream");
}

TEST_F(DatasetTest, BrokenFilesAreNamedByFieldPositionAndValue) {
  ASSERT_TRUE(Open(Good().Encode(), 4).ok());
  for (const Broken& broken : kBroken) {
    RawDataset raw = Good();
    broken.edit(raw);
    const absl::Status status = Open(raw.Encode(), 4).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument)
        << broken.name << ": " << status;
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr(path_)) << broken.name;
    for (const std::string& part : broken.named) {
      EXPECT_THAT(message, HasSubstr(part)) << broken.name;
    }
  }
}

TEST_F(DatasetTest, SequenceLongerThanTheStreamIsAnError) {
  EXPECT_TRUE(Open(Good().Encode(), 40).ok());
  const absl::Status status = Open(Good().Encode(), 41).status();
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("40 tokens"), HasSubstr("sequence of 41"),
                    HasSubstr("lower sequence_length")));
}

TEST_F(DatasetTest, SequenceLengthMustAllowALabel) {
  for (const int64_t length : {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{1},
                               int64_t{1} << 31, INT64_MAX}) {
    const absl::Status status = Open(Good().Encode(), length).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("sequence_length = ", length)));
  }
}

TEST_F(DatasetTest, WhatIsNoFileIsAnErrorAtOnce) {
  std::remove(path_.c_str());
  EXPECT_EQ(Dataset::Open(path_, 4, 10).status().code(),
            absl::StatusCode::kNotFound);
  // A FIFO without a writer would block a plain open for ever.
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THAT(std::string(Dataset::Open(path_, 4, 10).status().message()),
              HasSubstr("not a regular file"));
  EXPECT_FALSE(Dataset::Open(testing::TempDir(), 4, 10).ok());
}

TEST_F(DatasetTest, FileBeyondMemoryIsRefusedBeforeItIsRead) {
  // 8 EiB would not fit a file; 4 TiB of holes cost nothing to make.
  const int64_t tokens = int64_t{1} << 40;
  std::vector<model::TensorEntry> entries = {
      {"doc_offsets", model::DType::kI64, {2}, 0, 0},
      {"input_ids", model::DType::kI32, {tokens}, 0, 0},
      {"loss_mask", model::DType::kU8, {tokens}, 0, 0}};
  const std::string header =
      model::EncodeSafetensorsHeader(entries, Good().metadata);
  UniqueFd fd = OpenFile(path_, O_WRONLY | O_TRUNC).value();
  ASSERT_TRUE(
      PwriteFully(fd.get(), header.data(), header.size(), 0, path_).ok());
  if (ftruncate(fd.get(), static_cast<off_t>(entries.back().end)) != 0) {
    GTEST_SKIP() << "the file system takes no file of 5 TiB";
  }
  const absl::Status status = Dataset::Open(path_, 4, 10).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("5.00 TiB"));
}

// Byte and length mutations of a good file: each opens or gives one error, and
// what opens can be filled. Run under ASan and UBSan.
TEST_F(DatasetTest, MutatedFilesNeverCrash) {
  std::mt19937 random(20240607);
  for (const std::string layout : {"stream", "documents"}) {
    RawDataset raw = Good();
    raw.metadata["layout"] = layout;
    const std::string good = raw.Encode();
    const size_t header_end = good.size() - (4 * 8 + 40 + 40 * 4);
    int refused = 0;
    for (int round = 0; round < 400; ++round) {
      std::string bad = good;
      for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
        // Half in the header, half in the tensors.
        const size_t at =
            random() % 2 == 0
                ? random() % header_end
                : header_end + random() % (bad.size() - header_end);
        switch (random() % 5) {
          case 0:
            bad[at] = static_cast<char>(random());
            break;
          case 1:
            bad[at] ^= static_cast<char>(1 << random() % 8);
            break;
          case 2:
            bad.insert(at, 1, static_cast<char>(random()));
            break;
          case 3:
            bad.erase(at, 1);
            break;
          case 4:
            bad[at] = "0123456789-,[]{}\"\\"[random() % 18];
            break;
        }
        if (bad.size() <= header_end) break;
      }
      if (round % 40 == 0) bad.resize(random() % bad.size());
      const auto dataset = Open(bad, 2 + random() % 12);
      if (!dataset.ok()) {
        ++refused;
        EXPECT_THAT(std::string(dataset.status().message()), HasSubstr(path_));
        continue;
      }
      uint64_t labels = 0;
      for (uint64_t i = 0; i < dataset->sequences(); ++i) {
        const Sequence s = Get(*dataset, i);
        for (const int32_t id : s.ids) ASSERT_TRUE(id >= 0 && id < 1000);
        for (const int32_t label : s.labels) {
          ASSERT_TRUE(label >= -1 && label < 1000);
          labels += label >= 0;
        }
      }
      EXPECT_EQ(labels, dataset->valid_tokens());
    }
    EXPECT_GT(refused, 200);
  }
}

}  // namespace
}  // namespace slidedp::data
