#include "common/model/output.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/model/copy_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/lossy_disk.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {
namespace {

namespace fs = std::filesystem;
using ::slidedp::testing::kInvalid;
using slidedp::testing::ReadWhole;
using slidedp::testing::StatusIs;
using slidedp::testing::TempFolder;
using slidedp::testing::TinyConfig;
using slidedp::testing::TinyModelOptions;
using slidedp::testing::WriteTinyModel;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::set<std::string> NamesIn(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename());
  }
  return names;
}

// A tiny model and all that is needed to write it out again.
struct Model {
  explicit Model(const TinyModelOptions& options)
      : layout(MakeStateLayout(TinyConfig(options))) {
    WriteTinyModel(folder.Sub("in"), options);
  }
  void Open() {
    auto opened = OpenModelFolder(in());
    ASSERT_OK(opened);
    source = *std::move(opened);
  }
  std::string in() const { return folder.Sub("in"); }
  std::string out() const { return folder.Sub("out"); }
  absl::StatusOr<std::unique_ptr<OutputFolder>> Create(
      DiskCalls& calls = RealDiskCalls()) {
    return OutputFolder::Create(out(), in(), source, layout, "job7", calls);
  }
  // What the daemon does: trained tensors at the source's places.
  void WriteTrained(const OutputFolder& output,
                    DiskCalls& calls = RealDiskCalls()) const {
    std::set<std::string> trained;
    for (const Unit& unit : layout.units) {
      for (const Tensor& tensor : unit.tensors) trained.insert(tensor.name);
    }
    if (layout.tied()) trained.insert(kHeadName);
    for (size_t i = 0; i < source.files().size(); ++i) {
      for (const TensorEntry& entry : source.files()[i].header.tensors) {
        if (trained.count(entry.name) == 0) continue;
        ASSERT_OK(CopyRange(source.files()[i].fd.get(), output.files()[i].get(),
                            entry.begin, entry.end, entry.name, calls));
      }
    }
  }

  TempFolder folder;
  StateLayout layout;
  TensorSource source;
};

class OutputTest : public ::testing::TestWithParam<TinyModelOptions> {};

TEST_P(OutputTest, UntrainedModelComesBackByteForByte) {
  Model model(GetParam());
  model.Open();
  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  EXPECT_FALSE(fs::exists(model.out())) << "absent until committed";
  model.WriteTrained(*output);
  ASSERT_OK(output->Commit());
  output.reset();
  EXPECT_EQ(NamesIn(model.out()), NamesIn(model.in()));
  for (const std::string& name : NamesIn(model.in())) {
    EXPECT_EQ(ReadWhole(absl::StrCat(model.out(), "/", name)),
              ReadWhole(absl::StrCat(model.in(), "/", name)))
        << name;
  }
  EXPECT_THAT(NamesIn(model.folder.path()), UnorderedElementsAre("in", "out"));
  ASSERT_OK_AND_ASSIGN(TensorSource again, OpenModelFolder(model.out()));
  EXPECT_OK(ValidateSource(model.layout, again));
}

TEST_P(OutputTest, TrainedTensorsAreLeftToTheDaemon) {
  Model model(GetParam());
  model.Open();
  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  for (size_t i = 0; i < model.source.files().size(); ++i) {
    const SourceFile& file = model.source.files()[i];
    std::string bytes(file.header.file_bytes, '?');
    ASSERT_OK(PreadFully(output->files()[i].get(), bytes.data(), bytes.size(),
                         0, file.name));
    EXPECT_EQ(bytes.substr(file.header.data_begin),
              std::string(bytes.size() - file.header.data_begin, '\0'));
  }
}

std::vector<TinyModelOptions> Models() {
  std::vector<TinyModelOptions> all(6);
  all[1].shards = 4;
  all[2].dtype = DType::kF16;
  all[2].family = Family::kQwen2;
  all[3].dtype = DType::kF32;
  all[3].shards = 2;
  all[4].tied = all[4].extra_head = true;
  all[4].shards = 3;
  all[5].unaligned = true;
  all[5].tied = true;
  return all;
}

INSTANTIATE_TEST_SUITE_P(Variants, OutputTest, ::testing::ValuesIn(Models()));

TEST(OutputFolderTest, TensorsThatAreNotTrainedAreCopied) {
  Model model({});
  // The model's file, with one more tensor.
  model.Open();
  std::vector<TensorEntry> entries = model.source.files()[0].header.tensors;
  entries.push_back({"vision.patch", DType::kI64, {5}, 0, 0});
  std::string bytes = EncodeSafetensorsHeader(entries, {{"format", "pt"}});
  bytes.resize(entries.back().begin, 'w');
  bytes += std::string(40, 'v');
  model.folder.Write("in/model.safetensors", bytes);
  model.Open();
  ASSERT_OK(ValidateSource(model.layout, model.source));

  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  std::string tail(40, '?');
  ASSERT_OK(PreadFully(output->files()[0].get(), tail.data(), 40,
                       entries.back().begin, "out"));
  EXPECT_EQ(tail, std::string(40, 'v'));
}

TEST(OutputFolderTest, CompanionsGoAlongAndNothingElse) {
  Model model({});
  for (const char* name :
       {"LICENSE", "NOTICE.txt", "vocab.json", "merges.txt",
        "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
        "tokenizer.model", "preprocessor_config.json", "README.md",
        "pytorch_model.bin", "consolidated.safetensors", "x.gguf", "opt.pt",
        "tokenizer.bin", "training_args.json"}) {
    model.folder.Write(absl::StrCat("in/", name), name);
  }
  fs::create_directory(absl::StrCat(model.in(), "/original"));
  fs::create_directory(absl::StrCat(model.in(), "/tokenizer_folder"));
  model.folder.Write("blob", "licence text");
  fs::create_symlink("../blob", absl::StrCat(model.in(), "/LICENSE.link"));
  fs::create_symlink("nowhere", absl::StrCat(model.in(), "/NOTICE.dangling"));
  ASSERT_EQ(mkfifo(absl::StrCat(model.in(), "/tokenizer.fifo").c_str(), 0600),
            0);
  model.Open();
  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  ASSERT_OK(output->Commit());
  EXPECT_THAT(
      NamesIn(model.out()),
      UnorderedElementsAre(
          "config.json", "generation_config.json", "tokenizer.json",
          "tokenizer_config.json", "model.safetensors", "LICENSE",
          "LICENSE.link", "NOTICE.txt", "vocab.json", "merges.txt",
          "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
          "tokenizer.model", "preprocessor_config.json"));
  std::string link = absl::StrCat(model.out(), "/LICENSE.link");
  EXPECT_FALSE(fs::is_symlink(link));
  EXPECT_EQ(ReadWhole(link), "licence text");
}

// Whatever a power failure loses of what is not synced.
TEST(OutputFolderTest, IsCompleteOrAbsentAfterAPowerFailure) {
  for (int shards : {1, 2}) {
    TinyModelOptions options;
    options.layers = 1;
    options.hidden = 32;
    options.vocab = 64;
    options.shards = shards;
    Model model(options);
    model.Open();
    slidedp::testing::LossyDisk disk(model.folder.path());
    ASSERT_OK_AND_ASSIGN(auto output, model.Create(disk));
    model.WriteTrained(*output, disk);
    ASSERT_OK(output->Commit());
    const size_t names = NamesIn(model.out()).size();
    for (size_t calls = 0; calls <= disk.calls(); ++calls) {
      for (const auto& [tree, where] :
           disk.Remains(calls, static_cast<uint32_t>(calls))) {
        if (!tree.contains("out/")) {
          EXPECT_LT(calls, disk.calls()) << where;
          continue;
        }
        size_t found = 0;
        for (const auto& [path, bytes] : tree) {
          if (!absl::StartsWith(path, "out/") || path == "out/") continue;
          ++found;
          EXPECT_TRUE(bytes == tree.at("in/" + path.substr(4)))
              << where << ": " << path;
        }
        EXPECT_EQ(found, names) << where;
      }
    }
  }
}

TEST(OutputFolderTest, NothingIsLeftWithoutCommit) {
  Model model({});
  model.Open();
  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  EXPECT_EQ(NamesIn(model.folder.path()),
            (std::set<std::string>{"in", ".out.tmp-job7"}));
  output.reset();
  EXPECT_EQ(NamesIn(model.folder.path()), std::set<std::string>{"in"});
}

TEST(OutputFolderTest, NothingIsLeftWhenCreateFails) {
  Model model({});
  model.Open();
  fs::remove(absl::StrCat(model.in(), "/config.json"));
  EXPECT_THAT(model.Create(), StatusIs(kInvalid, HasSubstr("config.json")));
  EXPECT_EQ(NamesIn(model.folder.path()), std::set<std::string>{"in"});
}

TEST(OutputFolderTest, AnEmptyFolderIsReplaced) {
  Model model({});
  model.Open();
  fs::create_directory(model.out());
  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  ASSERT_OK(output->Commit());
  EXPECT_TRUE(fs::exists(absl::StrCat(model.out(), "/model.safetensors")));
}

TEST(OutputFolderTest, WhatAppearedMeanwhileIsNotReplaced) {
  Model model({});
  model.Open();
  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  fs::create_directory(model.out());
  model.folder.Write("out/precious", "x");
  EXPECT_FALSE(output->Commit().ok());
  output.reset();
  EXPECT_EQ(NamesIn(model.folder.path()), (std::set<std::string>{"in", "out"}));
  EXPECT_THAT(NamesIn(model.out()), ElementsAre("precious"));
}

TEST(OutputFolderTest, ALivingWritersFolderIsNotTaken) {
  Model model({});
  model.Open();
  ASSERT_OK_AND_ASSIGN(auto first, model.Create());
  EXPECT_THAT(model.Create(), StatusIs(absl::StatusCode::kAlreadyExists,
                                       HasSubstr("another process")));
  ASSERT_OK(first->Commit());
}

TEST(OutputFolderTest, AKilledWritersFolderIsReplaced) {
  Model model({});
  model.Open();
  fs::create_directory(model.folder.Sub(".out.tmp-job7"));
  model.folder.Write(".out.tmp-job7/model.safetensors", "half written");
  ASSERT_OK_AND_ASSIGN(auto output, model.Create());
  model.WriteTrained(*output);
  ASSERT_OK(output->Commit());
  EXPECT_OK(OpenModelFolder(model.out()));
  EXPECT_THAT(NamesIn(model.folder.path()), UnorderedElementsAre("in", "out"));
}

TEST(OutputFolderTest, ALeftoverThatIsNotOursStays) {
  Model model({});
  model.Open();
  fs::create_directories(model.folder.Sub(".out.tmp-job7/subfolder"));
  EXPECT_THAT(model.Create(),
              StatusIs(kInvalid, HasSubstr("can not be removed")));
  EXPECT_TRUE(fs::exists(model.folder.Sub(".out.tmp-job7/subfolder")));
}

TEST(OutputFolderTest, TooLittleSpaceIsToldBeforeWriting) {
  Model model({});
  // A valid, sparse file of 8 EiB / 16: more than any disk has free.
  std::vector<TensorEntry> entries = {
      {"huge", DType::kU8, {int64_t{1} << 42}, 0, 0}};
  std::string header = EncodeSafetensorsHeader(entries, {});
  model.folder.Write("in/model.safetensors", header);
  if (truncate(absl::StrCat(model.in(), "/model.safetensors").c_str(),
               static_cast<off_t>(entries[0].end)) != 0) {
    GTEST_SKIP() << "this file system has no files of 4 TiB";
  }
  model.Open();
  if (fs::space(model.folder.path()).available > entries[0].end) {
    GTEST_SKIP() << "this disk has more than 4 TiB free";
  }
  EXPECT_THAT(model.Create(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("4.00 TiB"), HasSubstr("are free"))));
  EXPECT_EQ(NamesIn(model.folder.path()), std::set<std::string>{"in"});
}

TEST(OutputFolderTest, ARefusedReservationLeavesNothing) {
  Model model({});
  model.Open();
  // A file size limit stands in for a disk that fills up meanwhile.
  auto previous = signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 65536;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  auto output = model.Create();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, previous);
  ASSERT_FALSE(output.ok());
  EXPECT_THAT(std::string(output.status().message()),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("reserve")));
  EXPECT_EQ(NamesIn(model.folder.path()), std::set<std::string>{"in"});
}

TEST(OutputPathTest, AbsentOrEmptyBelowAFolder) {
  TempFolder folder;
  EXPECT_OK(CheckOutputPath(folder.Sub("new")));
  EXPECT_OK(CheckOutputPath(folder.Sub("new///")));
  fs::create_directory(folder.Sub("empty"));
  EXPECT_OK(CheckOutputPath(folder.Sub("empty")));
}

TEST(OutputPathTest, RefusesEverythingElseByName) {
  TempFolder folder;
  folder.Write("file", "x");
  fs::create_directory(folder.Sub("full"));
  folder.Write("full/file", "x");
  fs::create_directory(folder.Sub("empty"));
  fs::create_symlink(folder.Sub("empty"), folder.Sub("link"));
  const auto not_found = absl::StatusCode::kNotFound;
  EXPECT_THAT(CheckOutputPath(folder.Sub("no/new")),
              StatusIs(not_found, HasSubstr("/no")));
  EXPECT_THAT(CheckOutputPath(folder.Sub("file/new")),
              StatusIs(kInvalid, HasSubstr("not a folder")));
  EXPECT_THAT(CheckOutputPath(folder.Sub("file")),
              StatusIs(kInvalid, HasSubstr("not a folder")));
  EXPECT_THAT(CheckOutputPath(folder.Sub("full")),
              StatusIs(kInvalid, HasSubstr("not empty")));
  EXPECT_THAT(CheckOutputPath(folder.Sub("link")),
              StatusIs(kInvalid, HasSubstr("symbolic link")));
  for (const std::string& path :
       {std::string(""), std::string("/"), folder.Sub("."), folder.Sub("..")}) {
    EXPECT_THAT(CheckOutputPath(path), StatusIs(kInvalid)) << path;
  }
}

// In a process of its own: root may write everywhere, so it becomes nobody.
TEST(OutputPathDeathTest, RefusesAFolderWithoutWriteAccess) {
  TempFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(mkdir(folder.Sub("locked").c_str(), 0555), 0);
  ASSERT_EQ(chmod(folder.Sub("locked").c_str(), 0555), 0);
  EXPECT_EXIT(
      {
        if (geteuid() == 0 && setuid(65534) != 0) _exit(2);
        absl::Status status = CheckOutputPath(folder.Sub("locked/new"));
        _exit(absl::IsPermissionDenied(status) ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace slidedp::model
