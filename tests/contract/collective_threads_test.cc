#include "tests/contract/collective_contract_test.h"

namespace slidedp::collective {
namespace {

INSTANTIATE_TEST_SUITE_P(Threads, CollectiveContract,
                         ::testing::Combine(::testing::Values(CollectiveBackend{
                                                "shm_threads", RunAsThreads}),
                                            ::testing::Values(1, 2, 3, 5)),
                         CollectiveContractName);

INSTANTIATE_TEST_SUITE_P(Solo, CollectiveContract,
                         ::testing::Combine(::testing::Values(CollectiveBackend{
                                                "solo", RunSolo}),
                                            ::testing::Values(1)),
                         CollectiveContractName);

}  // namespace
}  // namespace slidedp::collective
