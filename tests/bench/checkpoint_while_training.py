#!/usr/bin/env python3
"""What a checkpoint costs a job that trains on: step times before, during and
after it, and host memory beyond the job's own, through the real daemon and
workers.

    checkpoint_while_training.py --binaries BUNDLE/bin --folder ON_THE_DISK \\
        --shape qwen3-4b --ranks 1 --micro-batch-size 8 --json FILE

The job starts from random weights, is saved once on demand, and is cancelled a
few steps later. Prints one line for results/; exits 1 if something failed.
"""

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
import threading
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("scripts", "tests/references"):
    sys.path.insert(0, str(ROOT / folder))

from parts import result_line  # noqa: E402
from private_daemon import Daemon, write_dataset  # noqa: E402

QWEN3 = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128)
SHAPES = {
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=160,
                 num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16,
                 tie_word_embeddings=False),
} | {
    name: QWEN3 | dict(hidden_size=hidden, intermediate_size=inner,
                       num_hidden_layers=layers, num_attention_heads=heads,
                       tie_word_embeddings=tied)
    for name, hidden, inner, layers, heads, tied in (
        ("qwen3-0.6b", 1024, 3072, 28, 16, True),
        ("qwen3-1.7b", 2048, 6144, 28, 16, True),
        ("qwen3-4b", 2560, 9728, 36, 32, True),
        ("qwen3-8b", 4096, 12288, 36, 32, False))
}


def config(shape):
    return shape | {"architectures": ["Qwen3ForCausalLM"],
                    "model_type": "qwen3", "hidden_act": "silu",
                    "rms_norm_eps": 1e-6, "attention_bias": False,
                    "max_position_embeddings": 40960, "rope_theta": 1e6,
                    "use_sliding_window": False, "torch_dtype": "bfloat16"}


class Memory(threading.Thread):
    """Proportional set size of the daemon and its workers, sampled."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.root = daemon.process.pid
        self.socket = str(daemon.socket).encode()
        self.samples = []  # (monotonic seconds, bytes)
        self.over = threading.Event()

    def processes(self):
        yield self.root
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_bytes()
            except OSError:
                continue
            if b"slidedp-worker" in command and self.socket in command:
                yield int(path.parent.name)

    def run(self):
        while not self.over.wait(0.25):
            total = 0
            for pid in set(self.processes()):
                try:
                    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
                except OSError:
                    continue
                total += sum(int(line.split()[1]) for line in text.splitlines()
                             if line.startswith("Pss:")) * 1024
            self.samples.append((time.monotonic(), total))

    def peak(self, begin, end):
        return max((size for at, size in self.samples if begin <= at <= end),
                   default=0)


class Measurement:
    def __init__(self, arguments, scratch):
        self.a = arguments
        self.scratch = scratch
        self.length = arguments.sequence_length
        shape = SHAPES[arguments.shape]
        model = scratch / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config(shape)))
        self.batch = (arguments.ranks * arguments.micro_batch_size *
                      arguments.micro_batches)
        rows = 2 * max(self.batch, 32)
        ids = np.random.default_rng(1).zipf(1.2, (rows, self.length))
        ids = ids % shape["vocab_size"]
        write_dataset(scratch / "tokens.safetensors", ids, np.ones(ids.shape),
                      np.arange(rows + 1) * self.length)

    def spec(self):
        a = self.a
        return {"name": "checkpoint-bench",
                "model": str(self.scratch / "model"),
                "data": str(self.scratch / "tokens.safetensors"),
                "output": str(self.scratch / "output"), "ranks": a.ranks,
                "device": a.device, "sequence_length": self.length,
                "batch_size": self.batch,
                "micro_batch_size": a.micro_batch_size, "steps": 1_000_000,
                "random_weights_seed": 1, "max_grad_norm": a.max_grad_norm}

    def wait_for_step(self, daemon, job, step):
        deadline = time.monotonic() + self.a.seconds
        while time.monotonic() < deadline:
            info = daemon.job(job)
            if info["state"] in ("FAILED", "CANCELLED", "COMPLETED"):
                raise RuntimeError(f"job {info['state']}: {info['reason']}")
            if info["step"] >= step:
                return info["step"]
            time.sleep(0.05)
        raise RuntimeError(f"step {step} not reached within "
                           f"{self.a.seconds} s")

    def run(self, daemon):
        a = self.a
        job = daemon.submit(self.spec())
        memory = Memory(daemon)
        memory.start()
        self.wait_for_step(daemon, job, a.warmup + a.steps)
        began = time.monotonic()
        daemon.call("checkpoint", job, "--wait", timeout=a.seconds)
        ended = time.monotonic()
        last = self.wait_for_step(
            daemon, job, daemon.job(job)["step"] + max(2, a.steps // 2))
        memory.over.set()
        memory.join()
        saved = daemon.job(job)["checkpoint"]
        folder = pathlib.Path(daemon.json("show", job)["log_folder"])
        size = sum(path.stat().st_size
                   for path in pathlib.Path(saved["path"]).iterdir())
        daemon.call("cancel", job, "--wait", "--timeout", 60)
        records = [json.loads(line) for line in
                   (folder / "metrics.jsonl").read_text().splitlines()]
        steps = {r["step"]: r["end_ns"] for r in records if "step" in r}
        return self.line(steps, saved["step"], last, began, ended, size,
                         memory)

    def line(self, ends_ns, saved, last, began, ended, size, memory):
        """`ends_ns`: CLOCK_MONOTONIC, as time.monotonic() is."""
        length = {step: (ends_ns[step] - ends_ns[step - 1]) * 1e-9
                  for step in ends_ns if step - 1 in ends_ns}
        before = [length[s] for s in range(self.a.warmup + 1, saved + 1)
                  if s in length]
        usual = float(np.median(before))
        # The file is written between this boundary and its end; steps that lie
        # there, a part of them or whole.
        start = ends_ns[saved] * 1e-9
        during = [length[s] for s in range(saved + 1, last + 1)
                  if s in length and ends_ns[s - 1] * 1e-9 < ended]
        writing = ended - start
        detail = {
            "model": self.a.shape, "ranks": self.a.ranks,
            "micro_batch_size": self.a.micro_batch_size,
            "micro_batches": self.a.micro_batches,
            "sequence_length": self.length,
            "max_grad_norm": self.a.max_grad_norm,
            "usual_step_seconds": usual, "steps_during": during,
            "steps_after": [length[s] for s in
                            range(saved + 1 + len(during), last + 1)
                            if s in length],
            "lost_seconds": sum(during) - usual * len(during),
            "checkpoint_bytes": size, "checkpoint_seconds": writing,
            "asked_seconds": ended - began,
            "bytes_per_second": size / writing,
            "pss_before_bytes": memory.peak(0, began),
            "pss_during_bytes": memory.peak(start, ended + 0.5),
        }
        detail["extra_host_gib"] = (
            detail["pss_during_bytes"] - detail["pss_before_bytes"]) / 2**30
        name = f"checkpoint-{self.a.shape}-r{self.a.ranks}"
        if self.a.micro_batches > 1:
            name += f"-x{self.a.micro_batches}"
        return result_line(name, sum(during) / len(during) / usual,
                           "step time during a checkpoint, of the usual",
                           "<= 1.05", self.a.binaries, detail)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True,
                        help="on the disk that is written to")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=1,
                        help="that a rank accumulates in a step: units change "
                        "in the last one only, so the rest is time to save")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--max-grad-norm", type=float,
                        help="default: no clipping, eager updates")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6,
                        help="before the checkpoint")
    parser.add_argument("--seconds", type=int, default=300,
                        help="longest wait for anything")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    arguments.binaries = arguments.binaries.resolve()
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="slidedp-checkpoint-",
                                            dir=arguments.folder))
    try:
        measurement = Measurement(arguments, scratch)
        daemon = Daemon(arguments.binaries, scratch)
        try:
            line = json.dumps(measurement.run(daemon))
        finally:
            daemon.stop()
    finally:
        shutil.rmtree(scratch)
    print(line)
    if arguments.json:
        with open(arguments.json, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
