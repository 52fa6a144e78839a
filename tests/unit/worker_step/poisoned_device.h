// A CPU device whose allocations of some names hold no numbers at first, which
// nothing that is computed from them survives.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "common/device/device.h"

namespace slidedp::step {

class PoisonedDevice : public device::Device {
 public:
  // Allocations whose names start with `prefix`.
  PoisonedDevice(std::unique_ptr<device::Device> device, std::string prefix)
      : device_(std::move(device)), prefix_(std::move(prefix)) {}

  absl::StatusOr<device::Buffer> Allocate(absl::string_view name, size_t bytes,
                                          device::Memory where) override {
    absl::StatusOr<device::Buffer> buffer =
        device_->Allocate(name, bytes, where);
    // NaN in float32 and in BF16.
    if (buffer.ok() && absl::StartsWith(name, prefix_)) {
      std::memset(buffer->data(), 0xff, bytes);
    }
    return buffer;
  }

  device::Kind kind() const override { return device_->kind(); }
  std::string description() const override { return device_->description(); }
  size_t allocated_bytes() const override { return device_->allocated_bytes(); }
  absl::StatusOr<std::unique_ptr<device::HostRegistration>> RegisterHost(
      void* data, size_t bytes, bool read_only) override {
    return device_->RegisterHost(data, bytes, read_only);
  }
  absl::StatusOr<std::unique_ptr<device::Stream>> NewStream(
      absl::string_view name) override {
    return device_->NewStream(name);
  }
  absl::StatusOr<std::unique_ptr<device::Event>> NewEvent() override {
    return device_->NewEvent();
  }
  absl::Status Copy(void* dst, const void* src, size_t bytes,
                    device::Stream& stream) override {
    return device_->Copy(dst, src, bytes, stream);
  }
  absl::Status FillZero(void* dst, size_t bytes,
                        device::Stream& stream) override {
    return device_->FillZero(dst, bytes, stream);
  }
  absl::Status Record(device::Event& event, device::Stream& stream) override {
    return device_->Record(event, stream);
  }
  absl::Status Wait(device::Event& event, device::Stream& stream) override {
    return device_->Wait(event, stream);
  }
  absl::Status WaitWord(const std::atomic<uint64_t>* word, uint64_t at_least,
                        device::Stream& stream) override {
    return device_->WaitWord(word, at_least, stream);
  }
  absl::Status WriteWord(std::atomic<uint64_t>* word, uint64_t value,
                         device::Stream& stream) override {
    return device_->WriteWord(word, value, stream);
  }
  absl::Status Synchronize(device::Stream& stream) override {
    return device_->Synchronize(stream);
  }
  absl::Status Synchronize(device::Event& event) override {
    return device_->Synchronize(event);
  }
  absl::StatusOr<int64_t> TimestampNs(device::Event& event) override {
    return device_->TimestampNs(event);
  }

 private:
  const std::unique_ptr<device::Device> device_;
  const std::string prefix_;
};

}  // namespace slidedp::step
