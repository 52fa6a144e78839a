"""Gradients in BF16 against PyTorch's own BF16 run of the same model.

The reference of each case is transformers' model in float32. A parameter's
error is ||gradient - reference|| / ||reference|| (Frobenius). PyTorch's error
is the root mean square over its BF16 runs (VARIANTS); ours comes from one step
of slidedp-golden-probe, rounded to BF16 as gradients are drained. Passed: every
matrix has error(ours) <= 2 x error(PyTorch), and so has every role of vectors
(norm weights, biases) over all layers together; see README.md.

Prints one JSON line a case, then a table; exits 1 if a case fails.
"""

import argparse
import gc
import json
import math
import pathlib
import re
import shutil
import signal
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as functional

import torch_model
from job_data import read_safetensors
from parts import ROOT, Clock
from golden_probe import run_probe
from private_daemon import write_dataset

LIMIT = 2.0
# A parameter whose reference gradient is below this share of the model's (with
# one token, q and k have none at all) has no relative error: ours must stay far
# below what rounding to BF16 (4e-3) does to the rest.
NO_GRADIENT = 1e-6
OUR_NO_GRADIENT = 1e-6
# (attention, sequences at once): PyTorch's BF16 runs.
VARIANTS = (("sdpa", None), ("eager", None), ("sdpa", 1))
# Attention matrices of `eager` beyond this length are left out.
LONGEST_EAGER = 2048
# name: (vocab, tied, sequence length, sequences, micro-batch, kept layers)
MIDDLE_CASES = {
    "qwen3-1024": (32000, False, 1024, 2, 1, 0),
    "qwen3-1024-kept": (32000, False, 1024, 2, 2, 4),
    "qwen3-1": (10007, True, 1, 3, 1, 0),
    "qwen3-127": (10007, False, 127, 3, 1, 2),
    "qwen3-4097": (10007, True, 4097, 1, 1, 4),
}


class Case:
    """A model folder, token ids and next-token labels [sequences, length]."""

    def __init__(self, name, folder, ids, labels, micro_batch, kept_layers,
                 every_position):
        self.name = name
        self.folder = folder
        self.ids = ids
        self.labels = labels
        self.micro_batch = micro_batch
        self.kept_layers = kept_layers
        self.every_position = every_position


def golden_case(source, scratch):
    folder = scratch / source.name
    shutil.copytree(source / "model", folder)
    golden = read_safetensors(source / "golden.safetensors")
    ids, mine = golden["input_ids"], golden["labels"]
    labels = np.full(ids.shape, -100, np.int64)
    labels[:, :-1] = mine[:, 1:]  # not yet shifted in the file
    return Case(source.name, folder, ids, labels, 1, None, False)


def middle_case(name, scratch, device):
    vocab, tied, length, sequences, micro_batch, kept = MIDDLE_CASES[name]
    folder = scratch / name
    shape = torch_model.MIDDLE | {"vocab_size": vocab,
                                  "tie_word_embeddings": tied}
    torch_model.write_random_model(folder, torch_model.qwen3_config(shape),
                                   seed=7, device=device, norm_spread=0.1)
    tokens = np.random.default_rng(length).integers(
        0, vocab, (sequences, length + 1))
    return Case(name, folder, tokens[:, :-1], tokens[:, 1:], micro_batch, kept,
                True)


def torch_gradients(case, device, dtype, attention, at_once):
    model = torch_model.load_model(case.folder, device, dtype, attention)
    ids = torch.tensor(case.ids).long().to(device)
    labels = torch.tensor(case.labels).long().to(device)
    valid = int((labels >= 0).sum())
    for part in torch.arange(len(ids)).split(at_once or len(ids)):
        logits = model(input_ids=ids[part], use_cache=False).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[part].flatten(),
            ignore_index=-100, reduction="sum") / valid
        loss.backward()
    return {name: parameter.grad.float()
            for name, parameter in model.named_parameters()}


def our_gradients(case, options, scratch, device):
    data = scratch / f"{case.name}.safetensors"
    tokens, mask = case.ids, np.ones(case.ids.shape)
    if case.every_position:
        tokens = np.concatenate([case.ids, case.labels[:, -1:]], axis=1)
        mask = np.ones(tokens.shape)
    else:
        mask[:, 1:] = case.labels[:, :-1] >= 0
    write_dataset(data, tokens, mask,
                  np.arange(len(tokens) + 1) * tokens.shape[1])
    ours = run_probe(options.binaries, case.folder, data,
                     sequence_length=case.ids.shape[1],
                     batch_size=len(tokens), micro_batch_size=case.micro_batch,
                     device=options.device, compute_dtype="bf16",
                     kept_layers=case.kept_layers,
                     label_every_position=case.every_position,
                     timeout_s=options.case_seconds, scratch=scratch)
    return {name.removeprefix("grad."): torch.tensor(value)
            .to(device).bfloat16().float() for name, value in ours.items()}


def role(name):
    return re.sub(r"\.\d+\.", ".*.", name)


def squared(tensor):
    return float(tensor.double().square().sum())


def compare(case, options, scratch):
    device = torch.device(options.device)
    # Before PyTorch fills the GPU.
    ours = our_gradients(case, options, scratch, device)
    reference = torch_gradients(case, device, torch.float32, "eager", 1)
    if set(ours) != set(reference):
        raise RuntimeError(f"only on one side: {set(ours) ^ set(reference)}")
    runs = []
    for attention, at_once in VARIANTS:
        if attention == "eager" and case.ids.shape[1] > LONGEST_EAGER:
            continue
        run = torch_gradients(case, device, torch.bfloat16, attention, at_once)
        runs.append({name: squared(run[name] - reference[name])
                     for name in reference})
        del run
        gc.collect()
    total = sum(squared(value) for value in reference.values())
    tensors, groups, none = {}, {}, {}
    for name, value in reference.items():
        size = squared(value)
        our_error = squared(ours[name] - value)
        torch_error = sum(run[name] for run in runs) / len(runs)
        if size < NO_GRADIENT ** 2 * total:
            none[name] = math.sqrt(squared(ours[name]) / total)
            continue
        tensors[name] = (our_error, torch_error, size)
        group = name if value.dim() > 1 else role(name)
        old = groups.get(group, (0, 0, 0))
        groups[group] = tuple(a + b for a, b in zip(
            old, (our_error, torch_error, size)))
    return judge(case, tensors, groups, none)


def ratio(entry):
    our_error, torch_error, _ = entry
    if our_error == 0:
        return 0.0
    value = math.sqrt(our_error / torch_error) if torch_error else math.inf
    return value if value == value else math.inf


def judge(case, tensors, groups, none):
    worst = sorted(groups, key=lambda name: -ratio(groups[name]))[:5]
    single = max(tensors, key=lambda name: ratio(tensors[name]))
    ratios = sorted(ratio(entry) for entry in groups.values())
    largest_none = max(none.values(), default=0.0)
    return {
        "case": case.name, "sequence_length": int(case.ids.shape[1]),
        "sequences": len(case.ids), "compared": len(groups),
        "worst_ratio": ratios[-1], "median_ratio": ratios[len(ratios) // 2],
        "worst": [{"name": name, "ratio": ratio(groups[name]),
                   "ours": math.sqrt(groups[name][0] / groups[name][2]),
                   "torch": math.sqrt(groups[name][1] / groups[name][2])}
                  for name in worst],
        "worst_single": {"name": single, "ratio": ratio(tensors[single])},
        "without_gradient": len(none), "largest_of_those": largest_none,
        "pass": ratios[-1] <= LIMIT and largest_none <= OUR_NO_GRADIENT}


class Alarm:
    """Ends a case that takes longer than `seconds`."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        def ring(*_):
            raise RuntimeError(f"the case did not end within {self.seconds} s")
        signal.signal(signal.SIGALRM, ring)
        signal.alarm(self.seconds)

    def __exit__(self, *_):
        signal.alarm(0)


def print_table(lines):
    print(f"\n{'case':22}{'worst ratio':>12}{'median':>8}{'ours':>10}"
          f"{'PyTorch':>10}  of")
    for line in lines:
        if "error" in line:
            print(f"{line['case']:22}FAILED: {line['error'][:400]}")
            continue
        top = line["worst"][0]
        print(f"{line['case']:22}{line['worst_ratio']:12.3f}"
              f"{line['median_ratio']:8.3f}{top['ours']:10.2e}"
              f"{top['torch']:10.2e}  {top['name']}"
              f"{'' if line['pass'] else '  FAILED'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binaries", type=pathlib.Path, required=True)
    parser.add_argument("--goldens", type=pathlib.Path,
                        default=ROOT / "tests" / "goldens")
    parser.add_argument("--cases", help="NAME,... (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu: ours is in float32, for trying the script")
    parser.add_argument("--json", type=pathlib.Path,
                        help="also write the JSON lines to this file")
    parser.add_argument("--scratch", type=pathlib.Path,
                        default=pathlib.Path("/dev/shm"))
    parser.add_argument("--case-seconds", type=int, default=90)
    options = parser.parse_args()
    options.binaries = options.binaries.resolve()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    goldens = {p.parent.name: p.parent
               for p in sorted(options.goldens.glob("*/meta.json"))}
    names = (options.cases.split(",") if options.cases
             else [*MIDDLE_CASES, *goldens])
    unknown = set(names) - set(MIDDLE_CASES) - set(goldens)
    if unknown:
        parser.error(f"--cases: no case {', '.join(sorted(unknown))}")
    lines = []
    for name in names:
        clock = Clock()
        with tempfile.TemporaryDirectory(prefix="slidedp-bf16-",
                                         dir=options.scratch) as folder:
            scratch = pathlib.Path(folder)
            try:
                with Alarm(options.case_seconds):
                    case = (middle_case(name, scratch, options.device)
                            if name in MIDDLE_CASES
                            else golden_case(goldens[name], scratch))
                    line = compare(case, options, scratch)
            except Exception as error:  # the other cases still run
                line = {"case": name, "pass": False,
                        "error": f"{type(error).__name__}: {error}"}
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        line |= {"device": options.device, "seconds": clock.seconds()}
        lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        if options.json:
            with open(options.json, "a") as file:
                file.write(text + "\n")
    print_table(lines)
    sys.exit(0 if all(line["pass"] for line in lines) else 1)


if __name__ == "__main__":
    main()
