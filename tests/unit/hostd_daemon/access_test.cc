#include <sys/socket.h>
#include <unistd.h>

#include "hostd/server/authorize.h"
#include "hostd/server/identity.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr uint32_t kOwner = 1000;
constexpr uint32_t kOther = 1001;

TEST(AuthorizeTest, TableOfVerbsAndRoles) {
  const Identity owner{kOwner, false, "owner"};
  const Identity other{kOther, false, "other"};
  const Identity group_admin{kOther, true, "admin"};
  const Identity root{0, true, "root"};
  struct Row {
    Verb verb;
    bool concerns_job;
    bool owner, other, admin, root;
  };
  const Row table[] = {
      {Verb::kVersion, false, true, true, true, true},
      {Verb::kSubmit, false, true, true, true, true},
      {Verb::kList, false, true, true, true, true},
      {Verb::kGet, true, true, false, true, true},
      {Verb::kLogs, true, true, false, true, true},
      {Verb::kCancel, true, true, false, true, true},
      {Verb::kCheckpoint, true, true, false, true, true},
      {Verb::kJoin, true, true, false, false, false},
      {Verb::kDrain, false, false, false, true, true},
  };
  for (const Row& row : table) {
    std::optional<uint32_t> job;
    if (row.concerns_job) job = kOwner;
    SCOPED_TRACE(static_cast<int>(row.verb));
    EXPECT_EQ(Authorize(owner, row.verb, job).ok(), row.owner);
    EXPECT_EQ(Authorize(other, row.verb, job).ok(), row.other);
    EXPECT_EQ(Authorize(group_admin, row.verb, job).ok(), row.admin);
    EXPECT_EQ(Authorize(root, row.verb, job).ok(), row.root);
    if (row.concerns_job) {
      // A verb on a job without a job is nobody's.
      EXPECT_THAT(Authorize(root, row.verb, std::nullopt),
                  StatusIs(absl::StatusCode::kPermissionDenied));
    }
  }
}

TEST(AuthorizeTest, QueueIsRedactedForOthersOnly) {
  EXPECT_TRUE(SeesAll({kOwner, false, ""}, kOwner));
  EXPECT_FALSE(SeesAll({kOther, false, ""}, kOwner));
  EXPECT_TRUE(SeesAll({kOther, true, ""}, kOwner));
  EXPECT_TRUE(SeesAll({0, true, ""}, kOwner));
}

TEST(IdentifyTest, RootIsAdminEverywhere) {
  for (uint32_t own : {0u, kOwner}) {
    ASSERT_OK_AND_ASSIGN(Identity who, Identify({0, 0, 1, {}}, {own, "", ""}));
    EXPECT_TRUE(who.is_admin);
    EXPECT_EQ(who.uid, 0);
  }
}

TEST(IdentifyTest, UsersDaemonTakesItsUserAndRootOnly) {
  ASSERT_OK_AND_ASSIGN(Identity self,
                       Identify({kOwner, 100, 1, {}}, {kOwner, "", ""}));
  EXPECT_TRUE(self.is_admin);
  EXPECT_THAT(Identify({1, 1, 1, {}}, {kOwner, "", ""}),
              StatusIs(absl::StatusCode::kPermissionDenied));
  // Even one without an entry in the user database, as in a container.
  EXPECT_OK(Identify({4000000, 1, 1, {}}, {4000000, "", ""}));
}

TEST(IdentifyTest, RootsDaemonRefusesWhoeverHasNoName) {
  EXPECT_THAT(
      Identify({65534, 65534, 1, {}}, {0, "", ""}),
      StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("overflow")));
  EXPECT_THAT(Identify({4000000, 1, 1, {}}, {0, "", ""}),
              StatusIs(absl::StatusCode::kPermissionDenied,
                       HasSubstr("user database")));
}

// uid 1 (daemon) and the groups root (0) and daemon (1) exist on every Unix.
TEST(IdentifyTest, GroupsDecideOnAccessAndAdministration) {
  const Peer by_primary{1, 0, 1, {}};
  const Peer by_supplement{1, 1, 1, {5, 0}};
  const Peer outside{1, 1, 1, {5}};
  const AccessRules rules{0, "", "root"};
  EXPECT_TRUE(Identify(by_primary, rules)->is_admin);
  EXPECT_TRUE(Identify(by_supplement, rules)->is_admin);
  EXPECT_FALSE(Identify(outside, rules)->is_admin);
  EXPECT_FALSE(Identify(outside, {0, "", "no-such-group"})->is_admin);
  EXPECT_FALSE(Identify(outside, {0, "", ""})->is_admin);

  const AccessRules closed{0, "root", ""};
  EXPECT_OK(Identify(by_supplement, closed));
  EXPECT_THAT(Identify(outside, closed),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("root")));
  EXPECT_THAT(Identify(outside, {0, "no-such-group", ""}),
              StatusIs(absl::StatusCode::kPermissionDenied));
}

TEST(PeerTest, SocketPairIsOurselves) {
  int fds[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  ASSERT_OK_AND_ASSIGN(Peer peer, PeerOf(fds[0]));
  EXPECT_EQ(peer.uid, geteuid());
  EXPECT_EQ(peer.gid, getegid());
  EXPECT_EQ(peer.pid, getpid());
  close(fds[0]);
  close(fds[1]);
  EXPECT_FALSE(PeerOf(fds[0]).ok());
}

TEST(UserTest, RootIsKnownAndNobodyElseIsInvented) {
  ASSERT_OK_AND_ASSIGN(User root, UserOf(0));
  EXPECT_EQ(root.name, "root");
  EXPECT_FALSE(root.home.empty());
  EXPECT_THAT(root.groups, ::testing::Contains(0));
  EXPECT_THAT(UserOf(4000000), StatusIs(absl::StatusCode::kNotFound));
}

}  // namespace
}  // namespace slidedp::hostd
