"""The reference trainer: FSDP2 on transformers' model.

    fsdp2.py init --output FOLDER --seed 1
    python3 -m torch.distributed.run --standalone --nproc_per_node=G fsdp2.py \
        train --model FOLDER --data FILE --records FILE.jsonl ...

float32 master weights and AdamW, BF16 compute, gradients reduced in float32,
clipping by the global norm. Data, labels and learning rates are those of a job
with the same numbers (job_data.py, worker/data, policy/lr_schedule.cc).
"""

import argparse
import json
import math
import os
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as functional  # noqa: E402

import torch_model  # noqa: E402
from job_data import StreamData  # noqa: E402


def lr_factor(step, steps, warmup, kind, min_ratio):
    """policy/lr_schedule.cc; `step` counts from 0."""
    if step < warmup:
        return step / max(1, warmup)
    span = max(1.0, steps - warmup)
    if kind == "linear":
        return max(0.0, (steps - step) / span)
    if kind == "cosine":
        cosine = max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warmup) /
                                              span)))
        return min_ratio + (1 - min_ratio) * cosine
    return 1.0


def shard(model, mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                  reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def make_optimizer(model, options):
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1],
               "weight_decay": options.weight_decay},
              {"params": [p for p in parameters if p.dim() == 1],
               "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.lr,
                             betas=(options.beta1, options.beta2),
                             eps=options.eps, foreach=True)


def attention_kernel(name):
    from contextlib import nullcontext
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backends = {"flash": SDPBackend.FLASH_ATTENTION,
                "cudnn": SDPBackend.CUDNN_ATTENTION,
                "efficient": SDPBackend.EFFICIENT_ATTENTION}
    return sdpa_kernel(backends[name]) if name in backends else nullcontext()


def train(options):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = options.device == "cuda"
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    mesh = dist.init_device_mesh(options.device, (world,))
    model = torch_model.load_model(options.model, device, torch.float32)
    model.train()
    shard(model, mesh)
    optimizer = make_optimizer(model, options)
    data = StreamData(options.data, options.sequence_length, options.seed)
    if options.batch_size % world != 0:
        raise SystemExit(f"--batch-size {options.batch_size} is not a multiple "
                         f"of {world} ranks")
    rows = options.batch_size // world
    micro = min(rows, options.micro_batch_size)
    log = open(options.records, "w") if rank == 0 else None
    for step in range(options.steps):
        began = time.perf_counter()
        ids, labels = data.step(step, options.batch_size)
        valid = int((labels >= 0).sum())
        part = slice(rank * rows, (rank + 1) * rows)
        ids = torch.tensor(ids[part]).long().to(device)
        labels = torch.tensor(labels[part]).long().to(device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for first in range(0, rows, micro):
            some = slice(first, first + micro)
            with attention_kernel(options.attention):
                logits = model(input_ids=ids[some], use_cache=False).logits
                loss_sum = functional.cross_entropy(
                    logits.flatten(0, 1).float(), labels[some].flatten(),
                    ignore_index=-100, reduction="sum")
                del logits
                # FSDP divides the ranks' sum of gradients by their number.
                (loss_sum * (world / valid)).backward()
            total += loss_sum.detach().double()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(),
                                              options.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        lr = options.lr * lr_factor(step, options.steps, options.warmup_steps,
                                    options.schedule, options.min_lr_ratio)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        record = {"step": step + 1, "loss": total.item() / valid,
                  "grad_norm": norm.item(), "lr": lr, "valid_tokens": valid,
                  "seconds": time.perf_counter() - began}
        if log:
            log.write(json.dumps(record) + "\n")
            log.flush()
    if options.save:
        with open(os.path.join(options.model, "config.json")) as file:
            config = json.load(file)
        state = {name: parameter.detach().full_tensor()
                 for name, parameter in model.named_parameters()}
        if rank == 0:
            torch_model.save_model(state, config, options.save)
    dist.barrier()
    dist.destroy_process_group()


def init(options):
    config = torch_model.qwen3_config(
        torch_model.TINY if options.shape == "tiny"
        else torch_model.QWEN3_0_6B)
    torch_model.write_random_model(options.output, config, options.seed,
                                   options.device)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("init")
    command.add_argument("--output", required=True)
    command.add_argument("--shape", choices=("qwen3-0.6b", "tiny"),
                         default="qwen3-0.6b")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--device", default="cuda")
    command = commands.add_parser("train")
    for name in ("model", "data", "records"):
        command.add_argument(f"--{name}", required=True)
    command.add_argument("--save", help="write the trained weights, BF16")
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    command.add_argument("--attention", default="auto",
                         choices=("auto", "flash", "cudnn", "efficient"))
    for name in ("steps", "sequence-length", "batch-size", "warmup-steps",
                 "seed"):
        command.add_argument(f"--{name}", type=int, required=True)
    command.add_argument("--micro-batch-size", type=int, default=16,
                         help="sequences that a rank computes at once")
    for name in ("lr", "beta1", "beta2", "eps", "weight-decay",
                 "max-grad-norm", "min-lr-ratio"):
        command.add_argument(f"--{name}", type=float, required=True)
    command.add_argument("--schedule", required=True,
                         choices=("linear", "cosine", "constant"))
    options = parser.parse_args()
    init(options) if options.command == "init" else train(options)


if __name__ == "__main__":
    main()
