#include "hostd/server/identity.h"

#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {
namespace {

// What the kernel shows for a uid that has no place in our user namespace.
constexpr uint32_t kOverflowUid = 65534;

bool InGroup(const Peer& peer, const std::string& name) {
  if (name.empty()) return false;
  std::vector<char> buffer(16384);
  struct group entry;
  struct group* found = nullptr;
  int error;
  while ((error = getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(),
                             &found)) == ERANGE) {
    buffer.resize(buffer.size() * 2);
  }
  if (error != 0 || found == nullptr) return false;
  return peer.gid == entry.gr_gid ||
         std::find(peer.groups.begin(), peer.groups.end(), entry.gr_gid) !=
             peer.groups.end();
}

}  // namespace

absl::StatusOr<Peer> PeerOf(int socket) {
  struct ucred credentials;
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return ErrnoStatus(errno, "SO_PEERCRED");
  }
  Peer peer;
  peer.uid = credentials.uid;
  peer.gid = credentials.gid;
  peer.pid = credentials.pid;
  // SO_PEERGROUPS leaves out the primary group.
  std::vector<gid_t> groups(64);
  while (true) {
    size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) ==
        0) {
      break;
    }
    if (errno != ERANGE || size / sizeof(gid_t) <= groups.size()) {
      return ErrnoStatus(errno, "SO_PEERGROUPS");
    }
    groups.resize(size / sizeof(gid_t));
  }
  peer.groups.assign(groups.begin(), groups.begin() + size / sizeof(gid_t));
  return peer;
}

absl::StatusOr<Identity> Identify(const Peer& peer, const AccessRules& rules) {
  Identity identity;
  identity.uid = peer.uid;
  absl::StatusOr<User> user = UserOf(peer.uid);
  identity.user = user.ok() ? user->name : absl::StrCat(peer.uid);
  if (peer.uid == rules.own_uid || peer.uid == 0) {
    identity.is_admin = true;
    return identity;
  }
  if (rules.own_uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat(
        "uid ", peer.uid, " may not use the daemon of uid ", rules.own_uid));
  }
  if (peer.uid == kOverflowUid) {
    return absl::PermissionDeniedError(
        "the overflow uid 65534 stands for nobody in particular");
  }
  if (!user.ok()) {
    return absl::PermissionDeniedError(
        absl::StrCat("uid ", peer.uid, " is not in the user database"));
  }
  identity.is_admin = InGroup(peer, rules.admin_group);
  if (!rules.user_group.empty() && !identity.is_admin &&
      !InGroup(peer, rules.user_group)) {
    return absl::PermissionDeniedError(
        absl::StrCat(identity.user, " is not in the group ", rules.user_group));
  }
  return identity;
}

absl::StatusOr<User> UserOf(uint32_t uid) {
  std::vector<char> buffer(16384);
  struct passwd entry;
  struct passwd* found = nullptr;
  int error;
  while ((error = getpwuid_r(uid, &entry, buffer.data(), buffer.size(),
                             &found)) == ERANGE) {
    buffer.resize(buffer.size() * 2);
  }
  if (error != 0) return ErrnoStatus(error, "user database");
  if (found == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("uid ", uid, " is not in the user database"));
  }
  User user;
  user.uid = uid;
  user.gid = entry.pw_gid;
  user.name = entry.pw_name;
  user.home = entry.pw_dir;
  int count = 64;
  std::vector<gid_t> groups(count);
  while (getgrouplist(entry.pw_name, entry.pw_gid, groups.data(), &count) < 0) {
    groups.resize(std::max<size_t>(count, groups.size() * 2));
    count = static_cast<int>(groups.size());
  }
  user.groups.assign(groups.begin(), groups.begin() + count);
  return user;
}

}  // namespace slidedp::hostd
