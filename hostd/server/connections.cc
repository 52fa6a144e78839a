#include "hostd/server/connections.h"

#include <sys/socket.h>

#include <optional>

namespace slidedp::hostd {
namespace {

std::optional<uint64_t> CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) != 0) {
    return std::nullopt;
  }
  return cookie;
}

}  // namespace

bool Connections::Add(int fd, size_t most) {
  if (entries_.size() >= most && CountAlive() >= most) return false;
  std::optional<uint64_t> cookie = CookieOf(fd);
  if (!cookie) return false;
  entries_.push_back({fd, *cookie});
  return true;
}

size_t Connections::CountAlive() {
  std::erase_if(entries_, [](const Entry& entry) {
    return CookieOf(entry.fd) != entry.cookie;
  });
  return entries_.size();
}

}  // namespace slidedp::hostd
