#!/usr/bin/env python3
"""An exported model in transformers: its loss on held-out sequences against the
evaluation that the job itself made of the same step; see README.md.

Prints one JSON line a case; exits 1 if one differs by more than BF16's rounding,
lacks or adds a tensor, or failed.
"""

import argparse
import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
from safetensors import safe_open

from job_data import StreamData, unpack
from parts import Clock
from private_daemon import Daemon, write_dataset
from torch_model import QWEN3_0_6B, qwen3_config, write_random_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Unit roundoff of BF16: two evaluations of the same BF16 weights, one of them or
# both in BF16, differ by less. A tensor that is missing, stale or in another's
# place moves a loss that training has moved by more than that.
BOUND = 2.0 ** -9
LARGE = "qwen3-0.6b"
HELD_OUT = 32  # sequences


class Case:
    def __init__(self, name, arguments, scratch):
        self.a = arguments
        self.scratch = scratch
        self.model = scratch / "model"
        self.train, self.eval = scratch / "train.st", scratch / "eval.st"
        if name == LARGE:
            self.length, self.lr = 1024, 2e-4
            write_random_model(self.model, qwen3_config(QWEN3_0_6B), 1,
                               self.a.device)
            unpack(self.a.tokens, scratch / "tokens.st")
            ids = StreamData(scratch / "tokens.st", self.length, 0).ids
        else:
            # Sequences that a model can learn: each goes up by its own step.
            self.length, self.lr = 64, 3e-3
            shutil.copytree(ROOT / "tests" / "goldens" / name / "model",
                            self.model)
            vocab = json.loads(
                (self.model / "config.json").read_text())["vocab_size"]
            rng = np.random.default_rng(1)
            begin, by = rng.integers(1, vocab, (2, 640, 1))
            ids = (begin + by % 7 * np.arange(self.length)) % vocab
        self.held_out = ids[:HELD_OUT]
        self.write(self.eval, self.held_out)
        self.write(self.train, ids[HELD_OUT:])

    def write(self, path, ids):
        write_dataset(path, ids, np.ones(ids.shape),
                      np.arange(len(ids) + 1) * self.length)

    def spec(self):
        return {"model": str(self.model), "data": str(self.train),
                "output": str(self.scratch / "output"), "ranks": 1,
                "device": self.a.device, "sequence_length": self.length,
                "batch_size": 16, "micro_batch_size": 4, "steps": self.a.steps,
                "optimizer": {"lr": self.lr}, "schedule": "constant",
                "eval": {"data": str(self.eval), "every_steps": self.a.steps},
                "checkpoint": {"every_steps": self.a.steps}}

    def loss(self, folder, dtype):
        """transformers' mean loss over the held-out sequences."""
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(
            self.a.device)
        total = count = 0
        with torch.no_grad():
            for ids in np.split(self.held_out.astype(np.int64), HELD_OUT // 4):
                ids = torch.from_numpy(ids).to(self.a.device)
                logits = model(input_ids=ids).logits[:, :-1].float()
                labels = ids[:, 1:].reshape(-1)
                total += torch.nn.functional.cross_entropy(
                    logits.reshape(len(labels), -1), labels,
                    reduction="sum").item()
                count += len(labels)
        return total / count

    def run(self, daemon):
        records = daemon.run(self.spec(), self.a.job_seconds)
        evaluations = [r["loss"] for r in records if "eval_step" in r]
        job = daemon.json("status", "--all")["jobs"][-1]["id"]
        line = {"eval_before": evaluations[0], "eval_after": evaluations[-1]}
        keys = {}
        for dtype in ("source", "float32"):
            folder = self.scratch / dtype
            daemon.call("export", job, "-o", folder, "--dtype", dtype)
            keys[dtype] = tensors(folder)
        names = tensors(self.model)
        if not keys["source"] == keys["float32"] == names:
            raise RuntimeError(f"exported tensors differ from the source's by "
                               f"{sorted(names ^ keys['source'])}")
        line |= {"transformers_bf16": self.loss(self.scratch / "source",
                                                torch.bfloat16),
                 "transformers_float32": self.loss(self.scratch / "source",
                                                   torch.float32),
                 "masters_float32": self.loss(self.scratch / "float32",
                                              torch.float32)}
        ours = line["eval_after"]
        line["difference"] = max(
            abs(line[f"transformers_{kind}"] / ours - 1)
            for kind in ("bf16", "float32"))
        line["bound"] = BOUND
        # Training must have moved what is compared by far more.
        moved = abs(line["eval_before"] / ours - 1)
        line["pass"] = line["difference"] <= BOUND and moved > 8 * BOUND
        return line


def tensors(folder):
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=pathlib.Path,
                        help=f"what make_tokens wrote; {LARGE} reads it")
    parser.add_argument("--cases", default=f"{LARGE},qwen2_tied,llama_tied,"
                        "mistral_sliding")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--job-seconds", type=int, default=180)
    parser.add_argument("--scratch", type=pathlib.Path,
                        default=pathlib.Path("/dev/shm"))
    parser.add_argument("--json", type=pathlib.Path,
                        help="also append the lines to this file")
    arguments = parser.parse_args()
    arguments.binaries = arguments.binaries.resolve()
    passed = True
    for name in arguments.cases.split(","):
        clock = Clock()
        line = {"case": name, "device": arguments.device}
        with tempfile.TemporaryDirectory(prefix="slidedp-export-",
                                         dir=arguments.scratch) as temporary:
            scratch = pathlib.Path(temporary)
            daemon = Daemon(arguments.binaries, scratch)
            try:
                line |= Case(name, arguments, scratch).run(daemon)
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                line |= {"error": f"{type(error).__name__}: {error}",
                         "pass": False}
            finally:
                daemon.stop()
        line["seconds"] = clock.seconds()
        passed = passed and line["pass"]
        text = json.dumps(line)
        print(text, flush=True)
        if arguments.json:
            with open(arguments.json, "a") as file:
                file.write(text + "\n")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
