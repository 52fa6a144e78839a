// Hosts of two and four NUMA nodes that are not there, and this one.
#include "hostd/update/topology.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST(TopologyTest, SyntheticNodesWithTheirCpus) {
  ASSERT_OK_AND_ASSIGN(
      const HostTopology host,
      TopologyFromSynthetic("package:2 [numa(memory=1073741824)] core:2 pu:2"));
  ASSERT_THAT(host.nodes, SizeIs(2));
  EXPECT_EQ(host.nodes[1].os_index, 1);
  EXPECT_EQ(host.nodes[1].memory_bytes, 1073741824u);
  // Both cores' first hardware threads come first.
  EXPECT_THAT(host.nodes[0].cpus, ElementsAre(0, 2, 1, 3));
  EXPECT_THAT(host.nodes[1].cpus, ElementsAre(4, 6, 5, 7));
  EXPECT_TRUE(host.gpus.empty());
  ASSERT_OK_AND_ASSIGN(
      const HostTopology four,
      TopologyFromSynthetic(
          "package:2 [numa(memory=1GB)] group:2 [numa(memory=2GB)] pu:3"));
  EXPECT_THAT(four.nodes, SizeIs(6));  // of a package and of its halves
  EXPECT_THAT(
      TopologyFromSynthetic("nonsense"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("nonsense")));
}

// `nodes` packages of two cores; GPU i has bus 0x11 + 0x10 i and lies behind
// gpu_nodes[i], or directly under the machine (-1).
std::string Xml(int nodes, const std::vector<int>& gpu_nodes) {
  int index = 100;
  const auto next = [&index] { return index++; };
  const auto sets = [](const char* prefix, uint64_t cpus, uint64_t memory) {
    return absl::StrFormat(
        " %scpuset=\"0x%08x\" complete_cpuset=\"0x%08x\" nodeset=\"0x%08x\""
        " complete_nodeset=\"0x%08x\" ",
        prefix, cpus, cpus, memory, memory);
  };
  const auto gpus_of = [&](int node) {
    std::string xml;
    for (size_t i = 0; i < gpu_nodes.size(); ++i) {
      if (gpu_nodes[i] != node) continue;
      const int bus = 0x11 + 0x10 * static_cast<int>(i);
      absl::StrAppendFormat(
          &xml,
          "<object type=\"Bridge\" gp_index=\"%d\" bridge_type=\"0-1\""
          " depth=\"0\" bridge_pci=\"0000:[%02x-%02x]\">"
          "<object type=\"PCIDev\" gp_index=\"%d\""
          " pci_busid=\"0000:%02x:00.0\""
          " pci_type=\"0302 [10de:2335] [10de:18be] a1\""
          " pci_link_speed=\"63.0\"/>"
          "<object type=\"PCIDev\" gp_index=\"%d\""
          " pci_busid=\"0000:%02x:01.0\""
          " pci_type=\"0200 [15b3:1021] [15b3:0023] 00\""
          " pci_link_speed=\"63.0\"/></object>",
          index, bus - 1, bus, index + 1, bus, index + 2, bus);
      index += 3;
    }
    return xml;
  };
  const uint64_t all_cpus = (uint64_t{1} << (2 * nodes)) - 1;
  std::string xml =
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
      "<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology version=\"2.0\">";
  const uint64_t all_nodes = (uint64_t{1} << nodes) - 1;
  absl::StrAppend(
      &xml, "<object type=\"Machine\" os_index=\"0\"",
      sets("", all_cpus, all_nodes),
      absl::StrFormat("allowed_cpuset=\"0x%08x\" allowed_nodeset=\"0x%08x\"",
                      all_cpus, all_nodes),
      " gp_index=\"1\">");
  for (int n = 0; n < nodes; ++n) {
    const uint64_t cpus = uint64_t{3} << (2 * n), memory = uint64_t{1} << n;
    absl::StrAppend(&xml, "<object type=\"Package\" os_index=\"", n, "\"",
                    sets("", cpus, memory), "gp_index=\"", next(),
                    "\"><object type=\"NUMANode\" os_index=\"", n, "\"",
                    sets("", cpus, memory), "gp_index=\"", next(),
                    "\" local_memory=\"68719476736\"/>");
    for (int c = 0; c < 2; ++c) {
      const uint64_t cpu = uint64_t{1} << (2 * n + c);
      absl::StrAppend(&xml, "<object type=\"Core\" os_index=\"", 2 * n + c,
                      "\"", sets("", cpu, memory), "gp_index=\"", next(),
                      "\"><object type=\"PU\" os_index=\"", 2 * n + c, "\"",
                      sets("", cpu, memory), "gp_index=\"", next(),
                      "\"/></object>");
    }
    absl::StrAppend(&xml, gpus_of(n), "</object>");
  }
  absl::StrAppend(&xml, gpus_of(-1), "</object></topology>");
  return xml;
}

TEST(TopologyTest, GpusBehindEitherNode) {
  for (const std::vector<int>& behind :
       std::vector<std::vector<int>>{{0, 1}, {1, 0}, {1, 1}, {0, -1}}) {
    ASSERT_OK_AND_ASSIGN(const HostTopology host,
                         TopologyFromXml(Xml(2, behind)));
    ASSERT_THAT(host.nodes, SizeIs(2));
    EXPECT_THAT(host.nodes[1].cpus, ElementsAre(2, 3));
    EXPECT_EQ(host.nodes[1].memory_bytes, 68719476736u);
    ASSERT_THAT(host.gpus, SizeIs(2));  // the network cards aren't GPUs
    EXPECT_EQ(host.gpus[0].pci_bus_id, "0000:11:00.0");
    EXPECT_EQ(host.gpus[1].pci_bus_id, "0000:21:00.0");
    EXPECT_EQ(host.gpus[0].node, behind[0]);
    EXPECT_EQ(host.gpus[1].node, behind[1]);
  }
  ASSERT_OK_AND_ASSIGN(const HostTopology four,
                       TopologyFromXml(Xml(4, {3, 1, 2, 0, 2})));
  ASSERT_THAT(four.nodes, SizeIs(4));
  ASSERT_THAT(four.gpus, SizeIs(5));
  EXPECT_EQ(four.gpus[0].node, 3);
  EXPECT_EQ(four.gpus[4].node, 2);
  EXPECT_EQ(four.PlaceOf(3), 3);
  EXPECT_EQ(four.PlaceOf(9), -1);
  EXPECT_THAT(TopologyFromXml("<no topology"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("XML")));
}

TEST(TopologyTest, ThisHostHasANodeWithCpusAndMemory) {
  ASSERT_OK_AND_ASSIGN(const HostTopology host, DetectTopology());
  ASSERT_FALSE(host.nodes.empty());
  for (const NumaNode& node : host.nodes) {
    EXPECT_FALSE(node.cpus.empty());
    EXPECT_GT(node.memory_bytes, 0u);
  }
}

}  // namespace
}  // namespace slidedp::hostd
