// A whole job against plain loops, bit for bit.
#pragma once

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {

// No rank ever sees half of an update; all words end where they should.
inline void ExpectReference(const JobOptions& options) {
  SCOPED_TRACE(absl::StrCat("chunk ", options.chunk_bytes, ", ring ",
                            options.ring_chunks, ", threads ",
                            options.threads));
  Job job(options);
  const Snapshot start = Snapshot::Of(*job.state);
  for (uint64_t s = 0; s < options.steps; ++s) {
    job.versions.push_back(Reference(job, start, s).hi);
  }
  const Snapshot expected = Reference(job, start, options.steps);
  const Outcome outcome = RunJob(job);
  EXPECT_THAT(outcome.failures, ::testing::IsEmpty());
  EXPECT_EQ(outcome.steps_done, options.steps);
  EXPECT_EQ(outcome.torn_elements, 0u);
  EXPECT_TRUE(Snapshot::Of(*job.state) == expected);
  for (size_t u = 0; u < job.state->layout().units.size(); ++u) {
    EXPECT_EQ(job.state->versions().param_version(u).load(), options.steps);
  }
  for (int r = 0; r < options.ranks; ++r) {
    EXPECT_EQ(job.state->versions().grad_free(r).load(),
              options.steps * job.state->grad_schedule().chunks[r].size());
  }
}

}  // namespace slidedp::hostd
