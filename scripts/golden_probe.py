"""Gradients and logits of one step, from slidedp-golden-probe."""

import pathlib
import subprocess
import tempfile

from private_daemon import read_safetensors


def run_probe(binaries, model, data, *, sequence_length, batch_size,
              micro_batch_size=1, device="cpu", compute_dtype="fp32",
              kept_layers=None, offload_permille=0,
              label_every_position=False, logits=False,
              deterministic=False, timeout_s=60, scratch=None):
    """{"grad.NAME": float32 array, ..., "logits": ...}; raises RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="slidedp-probe-",
                                     dir=scratch) as folder:
        output = pathlib.Path(folder) / "step.safetensors"
        command = [pathlib.Path(binaries) / "slidedp-golden-probe",
                   "--model", model, "--data", data, "--output", output,
                   "--sequence-length", sequence_length,
                   "--batch-size", batch_size,
                   "--micro-batch-size", micro_batch_size,
                   "--device", device, "--compute-dtype", compute_dtype,
                   "--offload-permille", offload_permille]
        if kept_layers is not None:
            command += ["--kept-layers", kept_layers]
        for name, chosen in (("label-every-position", label_every_position),
                             ("logits", logits),
                             ("deterministic", deterministic)):
            if chosen:
                command.append(f"--{name}")
        try:
            result = subprocess.run([str(part) for part in command],
                                    capture_output=True, text=True,
                                    timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the probe did not end within {timeout_s} s") from None
        if result.returncode != 0:
            raise RuntimeError(f"the probe ended with {result.returncode}: "
                               f"{result.stderr.strip()[-2000:]}")
        return read_safetensors(output)
