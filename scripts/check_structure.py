#!/usr/bin/env python3
"""Checks of the tree that no compiler makes: scripts/lint runs it.

CUDA stays in its own files; folders depend on each other only as the
architecture allows; files stay short; unfinished work is not checked in.
"""

import pathlib
import re
import subprocess
import sys

MAX_LINES = 400

CUDA_FILE = re.compile(r"_cuda\.[a-z]+$|\.cuh?$|^(cuda|nccl)_")
CUDA_USE = re.compile(
    r"#include\s*[<\"](cuda|cublas|cudnn|nccl|curand|cub/)"
    r"|\b(cuda|cublasLt|cublas|cudnn|nccl|cu)[A-Z]\w*\s*\("
    r"|__global__|__device__|#\s*if.*\b(SLIDEDP_CUDA|__CUDACC__)\b")
# CMake may name CUDA where it switches it on.
CUDA_CMAKE = {"CMakeLists.txt", "SlideDP.cmake", "Cuda.cmake"}

# folder -> what its files may include, by prefix. The longest key counts.
MAY_INCLUDE = {
    "common/base": ["common/base"],
    "common/model": ["common/base", "common/model"],
    "common/checkpoint": ["common/base", "common/checkpoint", "common/model"],
    "common": ["common"],
    # Of shm and collective only what computes sizes.
    "policy": ["common/base", "common/model", "common/shm/words.h",
               "common/collective/exchange.h", "policy", "proto"],
    "hostd": ["common/base", "common/checkpoint", "common/shm", "common/model", "common/trace",
              "proto", "policy", "hostd"],
    # The client checks a dataset as the user, before the daemon is asked, and
    # counts GPUs through the worker's probe, as the daemon does.
    # What the planes' bits mean is one header's knowledge.
    "hostd/ctl": ["common/base", "common/checkpoint", "common/shm",
                  "common/model", "common/trace",
                  "proto", "policy", "hostd/ctl", "worker/data",
                  "hostd/launch/gpu_probe.h", "hostd/store/half.h",
                  "hostd/store/split.h"],
    "worker": ["common", "proto", "worker", "policy/plan.h", "policy/wire.h",
               "policy/lr_schedule.h", "policy/eval_schedule.h",
               "policy/activations.h"],
    # Benchmarks make plans of their own.
    "worker/bench": ["common", "proto", "worker", "policy"],
}
FORBIDDEN_LINKS = {
    "hostd": r"slidedp::(ops|device|collective|step|session|infer)\b",
    "worker": r"slidedp::(store|update|journal|launch|server|daemon|ctl)\b",
    "common": r"slidedp::(policy|store|update|journal|launch|server|daemon"
              r"|ctl|ops|data|step|session|infer)\b",
    "policy": r"slidedp::(device|collective|store|update|journal|launch"
              r"|server|daemon|ctl|ops|data|step|session|infer)\b",
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
SOURCE = (".h", ".cc", ".cu", ".cuh")


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    names = subprocess.run(["git", "ls-files"], cwd=root, check=True,
                           capture_output=True, text=True).stdout.split("\n")
    problems = []
    for name in filter(None, names):
        path = root / name
        if path.is_file() and path.suffix in (*SOURCE, ".txt", ".cmake",
                                              ".proto", ".py"):
            problems += check(name, path.read_text(encoding="utf-8"))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def check(name, text):
    base = name.rsplit("/", 1)[-1]
    source = name.endswith(SOURCE)
    lines = text.splitlines()
    if source and len(lines) > MAX_LINES:
        yield f"{name}: {len(lines)} lines, split it at {MAX_LINES}"
    folder = owner(name)
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        code = line.split("//" if source else "#", 1)[0]
        if UNFINISHED.search(line) and base != "check_structure.py":
            yield f"{where}: unfinished work: {line.strip()}"
        if source and not CUDA_FILE.search(base) and CUDA_USE.search(code):
            yield (f"{where}: CUDA outside cuda_*, nccl_*, *_cuda.*, *.cu,"
                   " *.cuh")
        if base.endswith((".txt", ".cmake")):
            if "CUDA" in code and base not in CUDA_CMAKE:
                yield f"{where}: CUDA outside {', '.join(sorted(CUDA_CMAKE))}"
            top = name.split("/", 1)[0]
            if top in FORBIDDEN_LINKS and re.search(FORBIDDEN_LINKS[top],
                                                    code):
                yield f"{where}: {top} must not link this: {line.strip()}"
        found = INCLUDE.match(line) if source else None
        if found and folder and not allowed(folder, found[1]):
            yield f"{where}: {folder} must not include {found[1]}"


def owner(name):
    keys = [key for key in MAY_INCLUDE if name.startswith(key + "/")]
    return max(keys, key=len, default=None)


def allowed(folder, included):
    top = included.split("/", 1)[0]
    if top not in ("common", "policy", "hostd", "worker", "proto", "tests"):
        return True  # a library's header in quotes
    return any(included == prefix or included.startswith(prefix + "/")
               for prefix in MAY_INCLUDE[folder])


if __name__ == "__main__":
    sys.exit(main())
