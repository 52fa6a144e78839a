// Who is at the other end of a Unix socket, by the kernel's word.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace slidedp::hostd {

struct Identity {
  uint32_t uid = 0;
  bool is_admin = false;
  std::string user;  // name, or the uid in digits
};

// What the daemon knows of itself when it judges a peer.
struct AccessRules {
  uint32_t own_uid = 0;
  std::string user_group;   // empty: everybody may connect
  std::string admin_group;  // empty or absent: nobody by group
};

// uid, gid and supplementary groups of a connected peer, as they were when it
// connected.
struct Peer {
  uint32_t uid = 0;
  uint32_t gid = 0;
  int32_t pid = 0;
  std::vector<uint32_t> groups;
};
absl::StatusOr<Peer> PeerOf(int socket);

// PermissionDenied, with the reason, for a peer that may not connect: of
// another user than a daemon that is not root, without an entry in the user
// database, of the overflow uid, outside of user_group.
absl::StatusOr<Identity> Identify(const Peer& peer, const AccessRules& rules);

// The user database's entry; groups are those of a login. NotFound if there is
// none.
struct User {
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::string name;
  std::string home;
  std::vector<uint32_t> groups;
};
absl::StatusOr<User> UserOf(uint32_t uid);

}  // namespace slidedp::hostd
