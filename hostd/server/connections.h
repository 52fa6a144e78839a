// Counts connections whose descriptors belong to somebody else (gRPC), by the
// sockets' cookies: a descriptor's number may be another file's by now, its
// cookie can't.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slidedp::hostd {

class Connections {
 public:
  // False if `most` are alive already, or the socket has no cookie.
  bool Add(int fd, size_t most);
  size_t CountAlive();

 private:
  struct Entry {
    int fd;
    uint64_t cookie;
  };
  std::vector<Entry> entries_;
};

}  // namespace slidedp::hostd
