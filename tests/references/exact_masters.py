#!/usr/bin/env python3
"""How far the goldens' own master weights are from exact ones.

Repeats the five steps of the goldens' `mixed` trajectory with transformers in
float64 and in float32: the same BF16 weights, the same rounding of gradients to
BF16, the same float32 AdamW. Prints one JSON line a case: the largest difference
of `master_after`, and how many elements differ by more than 1e-5. With --masters
also how far ours (scripts/golden --keep-masters) are from exact ones: the worst of
a case's runs. Needs PyTorch and transformers, no GPU.
"""

import argparse
import json
import pathlib
import re

import torch
from safetensors.torch import load_file

from torch_model import load_model

BOUND = 1e-5  # of scripts/golden


def round_away(master):
    """Float32 to BF16 values, ties away from zero: the `hi` plane."""
    bits = master.view(torch.int32) + 0x8000
    return (bits & ~0xffff).view(torch.float32)


class AdamW:
    """torch.optim.AdamW's arithmetic on float32 masters."""

    def __init__(self, masters, settings, no_decay):
        self.masters, self.settings, self.no_decay = masters, settings, no_decay
        self.m = {n: torch.zeros_like(p) for n, p in masters.items()}
        self.v = {n: torch.zeros_like(p) for n, p in masters.items()}
        self.t = 0

    def step(self, gradients):
        s = self.settings
        beta1, beta2 = s["betas"]
        self.t += 1
        norm = sum((g.double() ** 2).sum() for g in gradients.values()).sqrt()
        clip = min(1.0, s["max_grad_norm"] / (norm.item() + 1e-6))
        for name, master in self.masters.items():
            gradient = gradients[name] * clip
            if not self.no_decay.search(name):
                master *= 1 - s["lr"] * s["weight_decay"]
            m, v = self.m[name], self.v[name]
            m.lerp_(gradient, 1 - beta1)
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (v.sqrt() / (1 - beta2 ** self.t) ** 0.5).add_(s["eps"])
            master.addcdiv_(m, scale, value=-s["lr"] / (1 - beta1 ** self.t))


def train(folder, meta, golden, dtype):
    """The float32 masters after the golden's steps, forward and backward in
    `dtype`."""
    model = load_model(folder / "model", "cpu", dtype, "eager")
    rotary = model.model.rotary_emb
    # The reference models were cast to BF16 as a whole.
    rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16).to(dtype)
    rotary.original_inv_freq = rotary.inv_freq
    parameters = dict(model.named_parameters())
    masters = {n: p.detach().float().clone() for n, p in parameters.items()}
    optimizer = AdamW(masters, meta["optimizer"],
                      re.compile(meta["no_decay_pattern"]))
    ids = golden["input_ids"].long()
    labels = golden["labels"].long()[:, 1:].reshape(-1)
    for _ in range(meta["optimizer"]["steps"]):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(round_away(masters[name]))
                parameter.grad = None
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels, reduction="sum")
        (loss / (labels != -100).sum()).backward()
        with torch.no_grad():
            optimizer.step({n: p.grad.float().bfloat16().float()
                            for n, p in parameters.items()})
    return masters


def distance(masters, expected):
    errors = torch.cat([(masters[name] - expected[name]).abs().flatten()
                        for name in expected])
    beyond = int((errors > BOUND).sum())
    return {"largest": float(errors.max()), "beyond": beyond,
            "share": beyond / errors.numel()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--masters", type=pathlib.Path, metavar="DIR")
    arguments = parser.parse_args()
    for meta_file in sorted(arguments.folder.glob("*/meta.json")):
        folder = meta_file.parent
        ours = []
        if arguments.masters:
            ours = sorted((arguments.masters / folder.name).glob("*"))
            if not ours:
                continue
        meta = json.loads(meta_file.read_text())
        golden = load_file(folder / "golden.safetensors")
        reference = {name.removeprefix("master_after."): tensor
                     for name, tensor in golden.items()
                     if name.startswith("master_after.")}
        exact, single = (train(folder, meta, golden, dtype)
                         for dtype in (torch.float64, torch.float32))
        line = {"case": folder.name, "float64": distance(exact, reference),
                "float32": distance(single, reference),
                "float32_to_float64": distance(single, exact)}
        if ours:
            runs = [load_file(path) for path in ours]
            for name, other in (("ours", reference), ("ours_to_float64", exact)):
                line[name] = max((distance(run, other) for run in runs),
                                 key=lambda found: found["beyond"])
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
