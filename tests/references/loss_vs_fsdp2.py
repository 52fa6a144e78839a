"""200 steps of one model by SlideDP and by FSDP2: same initial weights, data,
order, AdamW, clipping and learning rates; see README.md.

Writes both loss curves as CSV and one line for tests/bench/results; exits 1 if
the losses of any step differ by more than the target, or a part failed.
"""

import argparse
import concurrent.futures
import csv
import json
import math
import pathlib
import shutil
import sys
import tempfile

from job_data import unpack
from parts import Clock, PartFailed, gpu_names, result_line, run_python
from private_daemon import Daemon

BENCH = "loss-vs-fsdp2-200"
TARGET = 5.0e-4
OPTIMIZER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0
DATA_SEED = 42
WEIGHTS_SEED = 1


class Comparison:
    def __init__(self, arguments, scratch):
        self.a = arguments
        self.scratch = scratch
        self.gpus = arguments.gpus
        self.data = scratch / "tokens.safetensors"
        self.model = scratch / "model"
        self.failed = {}
        self.seconds = {}

    def part(self, name, work):
        """`work`'s result; None if it failed, which is said and remembered."""
        clock = Clock()
        try:
            return work()
        except (PartFailed, RuntimeError, OSError, ValueError) as error:
            self.failed[name] = str(error)
            print(f"{name} FAILED: {error}", file=sys.stderr, flush=True)
            return None
        finally:
            self.seconds[name] = clock.seconds()
            print(f"{name}: {self.seconds[name]} s", flush=True)

    def make_model(self):
        run_python("fsdp2.py",
                   ["init", "--output", self.model, "--shape", self.a.shape,
                    "--seed", WEIGHTS_SEED, "--device", self.a.device],
                   gpus=0, log=self.scratch / "init.log",
                   timeout_s=self.a.part_seconds)

    def pretrain(self):
        trained = self.scratch / "pretrained"
        self.train(self.a.pretrain_lr, self.a.pretrain_steps, "pretrain",
                   ["--save", trained], seed=DATA_SEED + 1)
        shutil.rmtree(self.model)
        trained.rename(self.model)

    def train(self, lr, steps, name, options=(), attention="auto",
              seed=DATA_SEED):
        log = self.scratch / f"{name}.jsonl"
        arguments = ["train", "--model", self.model, "--data", self.data,
                     "--records", log, "--device", self.a.device,
                     "--attention", attention,
                     "--steps", steps,
                     "--sequence-length", self.a.sequence_length,
                     "--batch-size", self.a.batch_size,
                     "--lr", lr, "--schedule", "cosine",
                     "--warmup-steps", self.a.warmup_steps,
                     "--min-lr-ratio", 0.1, "--seed", seed,
                     "--max-grad-norm", MAX_GRAD_NORM, *options]
        for key, value in OPTIMIZER.items():
            arguments += [f"--{key.replace('_', '-')}", value]
        run_python("fsdp2.py", arguments, gpus=self.gpus,
                   log=self.scratch / f"{name}.log",
                   timeout_s=self.a.part_seconds)
        return [json.loads(line) for line in log.read_text().splitlines()]

    def slidedp(self):
        a = self.a
        daemon = Daemon(a.binaries, self.scratch)
        try:
            return daemon.run({
                "name": BENCH, "model": str(self.model),
                "data": str(self.data), "output": str(self.scratch / "output"),
                "ranks": self.gpus, "device": a.device,
                "sequence_length": a.sequence_length,
                "batch_size": a.batch_size,
                "micro_batch_size": a.micro_batch_size, "steps": a.steps,
                "optimizer": {"lr": a.lr, **OPTIMIZER},
                "schedule": {"kind": "cosine", "warmup_steps": a.warmup_steps,
                             "min_lr_ratio": 0.1},
                "max_grad_norm": MAX_GRAD_NORM, "seed": DATA_SEED,
                "tuning": {} if a.gpu_memory_limit is None else
                          {"gpu_memory_limit_gib": a.gpu_memory_limit},
            }, a.part_seconds)
        finally:
            daemon.stop()

    def compare(self, ours, theirs):
        """Differences by step; raises if the two did not do the same."""
        if len(ours) != self.a.steps or len(theirs) != self.a.steps:
            raise RuntimeError(f"{len(ours)} and {len(theirs)} steps instead "
                               f"of {self.a.steps}")
        for our, their in zip(ours, theirs):
            if our["valid_tokens"] != their["valid_tokens"]:
                raise RuntimeError(f"step {our['step']}: {our['valid_tokens']} "
                                   f"labels, and {their['valid_tokens']}")
            if abs(our["lr"] - their["lr"]) > 1e-9 * self.a.lr:
                raise RuntimeError(f"step {our['step']}: learning rates "
                                   f"{our['lr']} and {their['lr']}")
            if our["skipped"] or our["loss"] is None:
                raise RuntimeError(f"step {our['step']} was skipped")
            if not math.isfinite(their["loss"]):
                raise RuntimeError(f"step {our['step']}: FSDP2's loss is "
                                   f"{their['loss']}")
        return [our["loss"] - their["loss"]
                for our, their in zip(ours, theirs)]


def write_csv(path, ours, theirs, differences):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "lr", "fsdp2_loss", "slidedp_loss",
                         "difference", "fsdp2_grad_norm", "slidedp_grad_norm"])
        for our, their, difference in zip(ours, theirs, differences):
            writer.writerow([
                our["step"], f"{our['lr']:.6e}", f"{their['loss']:.7f}",
                f"{our['loss']:.7f}", f"{difference:.2e}",
                f"{their['grad_norm']:.5f}", f"{our['grad_norm']:.5f}"])


def summary(differences):
    sizes = [abs(d) for d in differences]
    return {"max_abs": max(sizes), "mean_abs": sum(sizes) / len(sizes),
            "mean": sum(differences) / len(differences),
            "max_at_step": sizes.index(max(sizes)) + 1}


def median_seconds(records):
    return sorted(r["seconds"] for r in records)[len(records) // 2]


def describe(arguments, gpus):
    start = "random weights (normal, 0.02)"
    if arguments.pretrain_steps:
        start += (f", then {arguments.pretrain_steps} FSDP2 steps at "
                  f"{arguments.pretrain_lr}")
    return {"model": arguments.shape, "start": start, "gpus": gpus,
            "steps": arguments.steps,
            "sequence_length": arguments.sequence_length,
            "batch_size": arguments.batch_size,
            "micro_batch_size": arguments.micro_batch_size,
            "lr": arguments.lr, "warmup_steps": arguments.warmup_steps,
            "schedule": "cosine to 0.1", **OPTIMIZER,
            "max_grad_norm": MAX_GRAD_NORM}


def report(comparison, ours, theirs, other):
    """The result line, or None."""
    a = comparison.a
    differences = comparison.part(
        "compare", lambda: comparison.compare(ours, theirs))
    if differences is None:
        return None
    write_csv(a.csv, ours, theirs, differences)
    found = summary(differences)
    detail = describe(a, comparison.gpus) | found | {
        "first_loss": [theirs[0]["loss"], ours[0]["loss"]],
        "last_loss": [theirs[-1]["loss"], ours[-1]["loss"]],
        "median_step_seconds": [median_seconds(theirs), median_seconds(ours)],
        "clipped_steps": sum(r["clip_coefficient"] < 1 for r in ours),
        "seconds": comparison.seconds}
    print(f"\n{'':24}{'FSDP2':>12}{'SlideDP':>12}")
    for name, key in (("loss of the first step", "first_loss"),
                      ("loss of the last step", "last_loss"),
                      ("median step, seconds", "median_step_seconds")):
        print(f"{name:24}{detail[key][0]:12.5f}{detail[key][1]:12.5f}")
    print(f"largest difference of a step's loss: {found['max_abs']:.2e} (step "
          f"{found['max_at_step']}; target {TARGET:.1e}); mean "
          f"{found['mean']:+.2e}, mean size {found['mean_abs']:.2e}")
    if other is not None and len(other) == len(theirs):
        between = summary([o["loss"] - t["loss"]
                           for o, t in zip(other, theirs)])
        detail["fsdp2_with_other_attention"] = between
        print(f"FSDP2 against FSDP2 with {a.noise_floor} attention: largest "
              f"{between['max_abs']:.2e} (step {between['max_at_step']}), mean "
              f"{between['mean']:+.2e}, mean size {between['mean_abs']:.2e}")
    return result_line(BENCH, found["max_abs"], "loss", TARGET, a.binaries,
                       detail)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=pathlib.Path, required=True,
                        help="what make_tokens wrote, .xz")
    parser.add_argument("--csv", type=pathlib.Path, required=True)
    parser.add_argument("--result", type=pathlib.Path,
                        help="append the result line to this file")
    parser.add_argument("--gpus", type=int, help="default: 2, or 1 if there "
                        "is one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=("qwen3-0.6b", "tiny"),
                        default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=48,
                        help="sequences a step; of 16, two runs of the "
                        "reference are further apart than the target")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--pretrain-steps", type=int, default=0,
                        help="FSDP2 steps before the comparison starts")
    parser.add_argument("--pretrain-lr", type=float, default=3e-4)
    parser.add_argument("--noise-floor", default="none",
                        choices=("none", "flash", "cudnn", "efficient"),
                        help="also FSDP2 with this attention: how far apart "
                        "two runs of PyTorch are")
    parser.add_argument("--together", action="store_true",
                        help="all runs at once: sooner over, and their step "
                        "times mean nothing")
    parser.add_argument("--gpu-memory-limit", type=float,
                        help="GiB for SlideDP, so that the others fit too")
    parser.add_argument("--scratch", type=pathlib.Path,
                        default=pathlib.Path("/dev/shm"))
    parser.add_argument("--part-seconds", type=int, default=180,
                        help="longest time of a part (default 180)")
    arguments = parser.parse_args()
    arguments.binaries = arguments.binaries.resolve()
    if arguments.gpus is None:
        arguments.gpus = min(2, len(gpu_names())) or 1
    if arguments.batch_size % arguments.gpus:
        parser.error(f"--batch-size {arguments.batch_size} is not a multiple "
                     f"of {arguments.gpus} GPUs")
    return arguments


def main():
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="slidedp-loss-",
                                     dir=arguments.scratch) as temporary:
        comparison = Comparison(arguments, pathlib.Path(temporary))
        unpack(arguments.tokens, comparison.data)
        part = comparison.part
        part("init", comparison.make_model)
        if arguments.pretrain_steps and not comparison.failed:
            part("pretrain", comparison.pretrain)
        line = None
        if not comparison.failed:
            runs = {"fsdp2": lambda: comparison.train(
                        arguments.lr, arguments.steps, "fsdp2"),
                    "slidedp": comparison.slidedp}
            if arguments.noise_floor != "none":
                runs["fsdp2, other attention"] = lambda: comparison.train(
                    arguments.lr, arguments.steps, "other",
                    attention=arguments.noise_floor)
            with concurrent.futures.ThreadPoolExecutor(
                    len(runs) if arguments.together else 1) as pool:
                done = dict(zip(runs, pool.map(part, runs, runs.values())))
            ours, theirs = done["slidedp"], done["fsdp2"]
            other = done.get("fsdp2, other attention")
            if ours is not None and theirs is not None:
                line = report(comparison, ours, theirs, other)
    if line is None:
        print(json.dumps({"bench": BENCH, "failed": comparison.failed}))
        sys.exit(1)
    text = json.dumps(line)
    print(text)
    if arguments.result:
        with open(arguments.result, "a") as file:
            file.write(text + "\n")
    sys.exit(0 if line["value"] <= TARGET and not comparison.failed else 1)


if __name__ == "__main__":
    main()
