// The contract of device::Device, run on every backend that a binary links
// (device_backends.h). Tests stand in device_*_contract_test.cc, by property.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "common/device/device.h"
#include "tests/contract/device_backends.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::device {

class DeviceContract : public ::testing::TestWithParam<DeviceBackend> {
 protected:
  DeviceContract() : device_(GetParam().make()) {
    words_buffer_ = Host(64 * sizeof(std::atomic<uint64_t>));
  }

  std::unique_ptr<Stream> NewStream(const std::string& name) {
    auto stream = device_->NewStream(name);
    EXPECT_THAT(stream, testing::IsOk());
    return *std::move(stream);
  }
  std::unique_ptr<Event> NewEvent() {
    auto event = device_->NewEvent();
    EXPECT_THAT(event, testing::IsOk());
    return *std::move(event);
  }
  Buffer Allocated(size_t bytes, Memory where) {
    auto buffer = device_->Allocate("test buffer", bytes, where);
    EXPECT_THAT(buffer, testing::IsOk());
    return *std::move(buffer);
  }
  Buffer Host(size_t bytes) { return Allocated(bytes, Memory::kPinnedHost); }
  Buffer OnDevice(size_t bytes) { return Allocated(bytes, Memory::kDevice); }
  // Zero at first.
  std::atomic<uint64_t>* word(size_t i) {
    return words_buffer_.as<std::atomic<uint64_t>>() + i;
  }

  // Streams are made by the tests, so they go before these.
  std::unique_ptr<Device> device_;
  Buffer words_buffer_;
};

inline void AwaitWord(const std::atomic<uint64_t>& word, uint64_t at_least) {
  while (word.load(std::memory_order_acquire) < at_least) {
    std::this_thread::yield();
  }
}

}  // namespace slidedp::device
