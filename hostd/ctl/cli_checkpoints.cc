// The command line's verbs about checkpoints.
#include "hostd/ctl/command_line.h"

namespace slidedp::ctl {

void AddCheckpointVerbs(CLI::App& app, CommandLine& line) {
  CheckpointOptions& checkpoint = line.checkpoint;
  CLI::App* verb = AddVerb(
      app, "checkpoint", "Save a running job at its next step", line,
      [&checkpoint](const Context& c) { return Checkpoint(c, checkpoint); });
  verb->add_option("ID", checkpoint.id, "Job")->required()->type_name("");
  verb->add_flag("--wait", checkpoint.wait, "Return when it is in place");
  verb->add_option("--timeout", checkpoint.timeout_s, "Wait at most this long")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);

  verb = AddVerb(
      app, "verify",
      "Check every byte of a checkpoint; exit code 1, and what is wrong, if "
      "there is anything",
      line,
      [&line](const Context& c) { return VerifyCheckpoint(c, line.verify); },
      /*needs_socket=*/false);
  verb->add_option("DIR", line.verify, "Checkpoint")->required()->type_name("");

  verb = AddVerb(
      app, "export", "Write a checkpoint's model as a Hugging Face folder",
      line,
      [&line](const Context& c) {
        line.export_options.float32 = line.export_dtype == "float32";
        return Export(c, line.export_options);
      },
      /*needs_socket=*/false);
  verb->add_option("FROM", line.export_options.from,
                   "A job's id (its newest checkpoint), or a checkpoint")
      ->required()
      ->type_name("");
  // Here, -o is not the global --output.
  verb->add_option("-o,--folder", line.export_options.to,
                   "Folder to make: absent or empty")
      ->required()
      ->type_name("DIR");
  verb->add_option("--dtype", line.export_dtype,
                   "source: as the model that was trained; float32: the exact "
                   "master weights")
      ->type_name("DTYPE")
      ->check(CLI::IsMember({"source", "float32"}));
}

}  // namespace slidedp::ctl
