"""A private slidedpd for scripts and tests, and safetensors without torch."""

import json
import pathlib
import signal
import subprocess
import time

import numpy as np

NUMPY = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16,
         "I64": np.int64, "I32": np.int32, "U8": np.uint8}


def read_safetensors(path, widen=True):
    """{name: array}; BF16 becomes float32 if `widen`, else its bits."""
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(data[8 + size + begin:8 + size + end],
                            NUMPY[entry["dtype"]])
        if entry["dtype"] == "BF16" and widen:
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = raw.reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors, metadata):
    """uint16 arrays are written as BF16."""
    names = {np.dtype(v): k for k, v in NUMPY.items()}
    header, at = {"__metadata__": metadata}, 0
    order = sorted(tensors, key=lambda n: -tensors[n].dtype.itemsize)
    for name in order:
        tensor = tensors[name]
        header[name] = {"dtype": names[tensor.dtype],
                        "shape": list(tensor.shape),
                        "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())


def write_dataset(path, ids, mask, offsets, layout="documents"):
    """A token dataset as worker/data/dataset.h describes it."""
    write_safetensors(
        path, {"input_ids": np.asarray(ids, np.int32).reshape(-1),
               "loss_mask": np.asarray(mask, np.uint8).reshape(-1),
               "doc_offsets": np.asarray(offsets, np.int64)},
        {"format": "slidedp-dataset", "version": "1", "layout": layout,
         "tokenizer_sha256": "none"})


class Daemon:
    """slidedpd with its folders in `scratch`; restartable."""

    def __init__(self, binaries, scratch, *options, command=()):
        self.binaries = pathlib.Path(binaries)
        self.scratch = pathlib.Path(scratch)
        self.socket = self.scratch / "run" / "slidedpd.sock"
        self.options = options
        self.command = command
        self.process = None
        self.start()

    def start(self):
        self.log = open(self.scratch / "slidedpd.log", "ab")
        self.process = subprocess.Popen(
            [*self.command, self.binaries / "slidedpd",
             "--runtime-dir", self.scratch / "run",
             "--state-dir", self.scratch / "state", *self.options],
            stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.answers():
                return
            time.sleep(0.02)
        raise RuntimeError(f"slidedpd did not start: {self.fate()}")

    def answers(self):
        """Whether this process, not a killed one's socket, serves calls."""
        if not self.socket.exists():
            return False
        # `version` succeeds without a daemon, and then names none.
        daemon = self.json("version")["daemon"]
        return daemon is not None and (bool(self.command) or
                                       daemon["pid"] == self.process.pid)

    def fate(self):
        """How the process ended, or that it lives, and its last words."""
        code = self.process.poll()
        if code is None:
            state = f"process {self.process.pid} lives"
        elif code < 0:
            state = f"slidedpd died of {signal.Signals(-code).name}"
        else:
            state = f"slidedpd left with exit code {code}"
        lines = (self.scratch / "slidedpd.log").read_text(
            errors="replace").splitlines()
        return "\n".join([f"{state}; the end of its log:", *lines[-20:]])

    def call(self, *arguments, check=True, **popen):
        result = subprocess.run(
            [self.binaries / "slidedpctl", "--socket", self.socket,
             "-o", "json", *map(str, arguments)],
            capture_output=True, text=True, **popen)
        if check and result.returncode != 0:
            raise RuntimeError(
                f"slidedpctl {' '.join(map(str, arguments))}: exit code "
                f"{result.returncode}: {result.stderr.strip()}\n"
                f"{self.fate()}")
        return result

    def json(self, *arguments):
        return json.loads(self.call(*arguments).stdout)

    def job(self, job_id):
        return self.json("status", job_id)["job"]

    def submit(self, spec, *options, check=True):
        """The job's id, or the failed call's result."""
        file = self.scratch / "job.yaml"
        file.write_text(json.dumps(spec))
        result = self.call("submit", file, *options, check=check)
        if result.returncode != 0 and not result.stdout.strip():
            return result
        return json.loads(result.stdout.splitlines()[0])["id"]

    def run(self, spec, timeout_s):
        """Runs a job to its end; its step records. Raises RuntimeError."""
        file = self.scratch / "job.yaml"
        file.write_text(json.dumps(spec))
        result = self.call("submit", file, "--wait", "--timeout", timeout_s,
                           check=False)
        if not result.stdout.strip():
            raise RuntimeError(f"submit: {result.stderr.strip()}")
        job = json.loads(result.stdout.splitlines()[0])["id"]
        if result.returncode != 0:
            if result.returncode == 7:
                self.call("cancel", job, "--wait", "--timeout", 30,
                          check=False)
            logs = self.call("logs", job, "--tail", 10, check=False)
            raise RuntimeError(f"job {job}: exit code {result.returncode}: "
                               f"{result.stderr.strip()} | "
                               f"{logs.stdout.strip()[-2000:]}")
        folder = pathlib.Path(self.json("show", job)["log_folder"])
        return [json.loads(line) for line in
                (folder / "metrics.jsonl").read_text().splitlines()]

    def kill(self):
        """An error if it had died by itself."""
        died = self.process.poll() is not None
        fate = self.fate()
        self.process.kill()
        self.process.wait()
        self.log.close()
        if died:
            raise RuntimeError(f"before the kill: {fate}")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise RuntimeError("slidedpd did not stop on SIGTERM") from None
        self.log.close()
        return self.process.returncode
