#include "tests/contract/collective_contract_test.h"

namespace slidedp::collective {
namespace {

INSTANTIATE_TEST_SUITE_P(Processes, CollectiveContract,
                         ::testing::Combine(::testing::Values(CollectiveBackend{
                                                "shm_processes",
                                                RunAsProcesses}),
                                            ::testing::Values(2, 3, 4, 5)),
                         CollectiveContractName);

}  // namespace
}  // namespace slidedp::collective
