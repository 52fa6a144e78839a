#include "worker/session/probe.h"

#include "common/device/accelerator.h"
#include "nlohmann/json.hpp"

namespace slidedp::session {

std::string ProbeLine() {
  using Json = nlohmann::ordered_json;
  Json json;
  json["cuda"] = device::AcceleratorIsBuilt();
  json["problem"] = "";
  json["gpus"] = Json::array();
  const auto list = device::ListAccelerators();
  if (!list.ok()) {
    json["problem"] = std::string(list.status().message());
  } else {
    for (const device::AcceleratorInfo& info : *list) {
      json["gpus"].push_back({{"name", info.name},
                              {"uuid", info.uuid},
                              {"memory_bytes", info.memory_bytes}});
    }
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace slidedp::session
