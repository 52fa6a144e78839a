"""Running the parts of a comparison unattended: each with a time limit, the
next one whatever became of the last."""

import datetime
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


class PartFailed(Exception):
    pass


def run_python(script, arguments, *, gpus, log, timeout_s):
    """Runs a script of this folder, under torch's launcher with `gpus` ranks
    (0: alone). Raises PartFailed with the end of its output."""
    command = [sys.executable]
    if gpus:
        command += ["-m", "torch.distributed.run", "--standalone",
                    f"--nproc_per_node={gpus}"]
    command += [pathlib.Path(__file__).with_name(script), *arguments]
    with open(log, "w") as output:
        process = subprocess.Popen([str(part) for part in command],
                                   stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = f"not ended within {timeout_s} s"
        finally:
            # Its ranks too.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    if code != 0:
        tail = pathlib.Path(log).read_text(errors="replace")[-3000:]
        raise PartFailed(f"{script} {arguments[0]}: {code}\n{tail}")


def gpu_names():
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []


def commit_of(binaries):
    """Of the bundle that holds the programs, else of this clone."""
    manifest = pathlib.Path(binaries).parent / "MANIFEST"
    if manifest.exists():
        for line in manifest.read_text().splitlines():
            if line.startswith("commit: "):
                return line.removeprefix("commit: ")
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"],
                          capture_output=True, text=True)
    return head.stdout.strip() or "unknown"


def result_line(bench, value, unit, target, binaries, detail):
    """As the files of tests/bench/results hold them."""
    names = gpu_names()
    machine = f"{len(names)} x {names[0]}" if names else "no GPU"
    return {"bench": bench, "value": value, "unit": unit, "target": target,
            "commit": commit_of(binaries),
            "date": datetime.date.today().isoformat(), "machine": machine,
            "command": " ".join([pathlib.Path(sys.argv[0]).name,
                                 *sys.argv[1:]]),
            "detail": detail}


class Clock:
    def __init__(self):
        self.began = time.monotonic()

    def seconds(self):
        return round(time.monotonic() - self.began, 1)
