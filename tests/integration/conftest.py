"""Real processes: a private slidedpd, its workers, slidedpctl."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from private_daemon import (Daemon, read_safetensors, write_dataset,  # noqa
                            write_safetensors)

GOLDENS = ROOT / "tests" / "goldens"


def pytest_addoption(parser):
    parser.addoption("--build", default=str(ROOT / "build" / "dev"),
                     help="the build whose binaries are tested")
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"),
                     help="what jobs compute on; cuda also runs cuda_test.py")
    parser.addoption("--kills", type=int, default=100,
                     help="how often the kill tests kill")
    parser.addoption("--resume-kills", type=int, default=6,
                     help="how often the checkpoint tests kill; 50 is thorough")


@pytest.fixture(scope="session")
def binaries(request):
    folder = pathlib.Path(request.config.getoption("--build")) / "bin"
    for name in ("slidedpd", "slidedp-worker", "slidedpctl"):
        assert (folder / name).exists(), f"build {name} first"
    return folder


@pytest.fixture
def daemon(binaries, tmp_path):
    (tmp_path / "daemon").mkdir()
    daemon = Daemon(binaries, tmp_path / "daemon")
    yield daemon
    code = daemon.stop()
    assert code == 0, daemon.fate()


class Job:
    """A tiny job's files. Change the attributes, then spec()."""

    def __init__(self, folder, case="llama_tied", sequences=8, length=24,
                 device="cpu", gpus=()):
        self.folder = folder
        self.device = device
        self.most_ranks = len(gpus) if device == "cuda" else 4
        self.model = folder / "model"
        shutil.copytree(GOLDENS / case / "model", self.model)
        for path in self.model.iterdir():
            path.chmod(0o644)
        (self.model / "tokenizer.json").write_text('{"a tokenizer": true}')
        self.data = folder / "data.safetensors"
        rng = np.random.default_rng(1)
        self.ids = rng.integers(0, 256, sequences * length)
        self.mask = np.ones(self.ids.shape)
        self.offsets = np.arange(sequences + 1) * length
        self.length = length
        self.write_data()

    def write_data(self):
        write_dataset(self.data, self.ids, self.mask, self.offsets)

    def config(self, **changes):
        path = self.model / "config.json"
        config = json.loads(path.read_text())
        config.update(changes)
        path.write_text(json.dumps(config))

    def weights(self, change):
        """change({name: uint16 array}) -> what is written instead."""
        path = self.model / "model.safetensors"
        write_safetensors(path, change(read_safetensors(path, widen=False)),
                          {"format": "pt"})

    def ranks(self, *wanted):
        """Those of them that this machine has GPUs for."""
        return [ranks for ranks in wanted if ranks <= self.most_ranks]

    def spec(self, **changes):
        """Two ranks, or one where there is one GPU. Skips the test if it wants
        more ranks than there are GPUs."""
        ranks = changes.setdefault("ranks", min(2, self.most_ranks))
        if ranks > self.most_ranks:
            pytest.skip(f"needs {ranks} GPUs")
        return {"name": "tiny", "model": str(self.model),
                "data": str(self.data), "output": str(self.folder / "output"),
                "device": self.device, "sequence_length": self.length,
                "batch_size": 4, "micro_batch_size": 1, "steps": 3,
                "optimizer": {"lr": 1e-3}, "schedule": "constant",
                "tuning": {"compute_threads": 1, "update_threads": 1},
                **changes}


@pytest.fixture
def device(request):
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def gpus(request, binaries):
    """What the worker sees; none unless jobs compute on GPUs."""
    if request.config.getoption("--device") != "cuda":
        return []
    result = subprocess.run([binaries / "slidedp-worker", "--probe"],
                            capture_output=True, text=True, check=True)
    probe = json.loads(result.stdout.splitlines()[-1])
    assert probe["cuda"] and not probe["problem"] and probe["gpus"], probe
    return probe["gpus"]


@pytest.fixture
def make_job(tmp_path, device, gpus):
    count = 0

    def make(*arguments, **keywords):
        nonlocal count
        count += 1
        folder = tmp_path / f"job{count}"
        folder.mkdir()
        return Job(folder, *arguments, device=device, gpus=gpus, **keywords)

    return make


def wait_for(what, condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {seconds} s")


def children(pid):
    """Living descendants of a process."""
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except FileNotFoundError:
            continue
        for task in tasks:
            try:
                text = pathlib.Path(
                    f"/proc/{parent}/task/{task}/children").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += map(int, text.split())
            queue += map(int, text.split())
    return found


def processes_with(text):
    """pids of living processes whose command line contains `text`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in command and state != "Z":
            found.append(int(entry.name))
    return found


def memfds(pid):
    found = 0
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += "memfd:" in os.readlink(fd)
        except FileNotFoundError:
            pass
    return found
