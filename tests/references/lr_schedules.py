#!/usr/bin/env python3
"""Learning-rate factors of transformers' own schedules, as a C++ table.

    python3 tests/references/lr_schedules.py TRANSFORMERS_FOLDER \
        > tests/unit/policy/lr_schedule_reference.inc

TRANSFORMERS_FOLDER is the package's folder (`pip install --no-deps
transformers` is enough). Its optimization.py is run as it is; PyTorch, of
which that file only needs names, is replaced by empty classes. The committed
table was made with transformers 5.24.0.
"""

import importlib.util
import pathlib
import sys
import types
import typing


class Anything:
    pass


class LambdaLR:
    """Makes the schedule functions return the factor's function."""

    def __new__(cls, optimizer, factor, *_, **__):
        return factor


def put(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []
    sys.modules[name] = module
    return module


def load(folder):
    put("torch", Tensor=Anything, no_grad=lambda: lambda f: f)
    put("torch.optim", Optimizer=Anything)
    put("torch.optim.lr_scheduler", LambdaLR=LambdaLR,
        ReduceLROnPlateau=Anything)
    put("transformers")
    put("transformers.trainer_pt_utils", LayerWiseDummyOptimizer=Anything,
         LayerWiseDummyScheduler=Anything)

    class Kinds(type):
        def __getattr__(cls, name):
            return name

    put("transformers.trainer_utils",
         SchedulerType=Kinds("SchedulerType", (), {}))
    logging = types.SimpleNamespace(get_logger=lambda name: None)
    put("transformers.utils", logging=logging)
    spec = importlib.util.spec_from_file_location(
        "transformers.optimization", folder / "optimization.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Case(typing.NamedTuple):
    kind: str
    warmup: int
    total: int
    floor: float = 0.0
    decay_steps: int = 0
    decay: str = "cosine"


CASES = [
    Case("constant", 0, 20), Case("constant", 5, 20),
    Case("linear", 0, 20), Case("linear", 7, 20), Case("linear", 20, 20),
    Case("cosine", 0, 20), Case("cosine", 3, 20),
    Case("cosine", 3, 20, 0.1), Case("cosine", 0, 1),
    Case("wsd", 4, 20, 0.0, 6), Case("wsd", 4, 20, 0.1, 6),
    Case("wsd", 0, 20, 0.25, 20, "linear"), Case("wsd", 2, 20, 0.0, 5, "linear"),
    Case("wsd", 2, 20, 0.05, 8, "1-sqrt"), Case("wsd", 10, 20, 0.0, 10),
]


def factor(module, case):
    if case.kind == "constant":
        return module.get_constant_schedule_with_warmup(None, case.warmup)
    if case.kind == "linear":
        return module.get_linear_schedule_with_warmup(None, case.warmup,
                                                      case.total)
    if case.kind == "cosine" and case.floor == 0:
        return module.get_cosine_schedule_with_warmup(None, case.warmup,
                                                      case.total)
    if case.kind == "cosine":
        return module.get_cosine_with_min_lr_schedule_with_warmup(
            None, case.warmup, case.total, min_lr_rate=case.floor)
    return module.get_wsd_schedule(None, case.warmup, case.decay_steps,
                                   num_training_steps=case.total,
                                   decay_type=case.decay,
                                   min_lr_ratio=case.floor)


KINDS = {"constant": "kConstant", "linear": "kLinear", "cosine": "kCosine",
         "wsd": "kWsd"}
DECAYS = {"cosine": "kCosine", "linear": "kLinear", "1-sqrt": "kOneMinusSqrt"}


def main():
    module = load(pathlib.Path(sys.argv[1]))
    print("// Of tests/references/lr_schedules.py, which says how it was made.")
    for case in CASES:
        values = [float(factor(module, case)(s))
                  for s in range(case.total + 3)]
        print(f"{{{{LrScheduleKind::{KINDS[case.kind]}, {case.warmup}, "
              f"{case.total}, {case.floor!r}, {case.decay_steps}, "
              f"LrDecay::{DECAYS[case.decay]}}},\n {{", end="")
        print(",\n  ".join(repr(v) for v in values) + "}},")


if __name__ == "__main__":
    main()
