"""slidedpctl bench through a daemon of its own, on the CPU device."""

import json
import os
import signal
import subprocess

import pytest
from conftest import processes_with, wait_for

# Two layers of Qwen3-0.6B with a small vocabulary.
LAYER = 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072
VOCAB, SEQ, BATCH, LAYERS = 2000, 64, 4, 2


def command(binaries, *more, steps=3):
    return [binaries / "slidedpctl", "bench", "--model", "qwen3-0.6b",
            "--layers", str(LAYERS), "--vocab", str(VOCAB), "--device", "cpu",
            "--ranks", "2", "--seq", str(SEQ), "--micro-batch-size", "1",
            "--batch-size", str(BATCH), "--steps", str(steps), "--warmup", "1",
            "--set", "tuning.compute_threads=1", *more]


def surroundings(folder):
    """No daemon of this host is found; temporary folders are ours."""
    for name in ("tmp", "xdg"):
        (folder / name).mkdir()
    return {**os.environ, "TMPDIR": str(folder / "tmp"),
            "XDG_RUNTIME_DIR": str(folder / "xdg"), "SLIDEDP_SOCKET": ""}


def test_figures_of_a_private_daemon(binaries, tmp_path):
    if os.path.exists("/run/slidedpd/slidedpd.sock"):
        pytest.skip("this host has a system daemon")
    file = tmp_path / "bench.json"
    result = subprocess.run(
        command(binaries, "--reference", "--json", file, "--keep", "selective",
                "--offload", "0.5"), timeout=300,
        capture_output=True, text=True, env=surroundings(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "tokens/s" in result.stdout and "excess" in result.stdout
    report = json.loads(file.read_text())

    tokens = BATCH * SEQ
    flops = {"dense": 6 * tokens * LAYERS * LAYER,
             "head": 6 * tokens * 1024 * VOCAB,
             "attention": 6 * tokens * LAYERS * SEQ * 2048}
    flops["total"] = sum(flops.values())
    assert report["model_flops_per_step"] == flops
    # Matrices, two norms and two head norms a layer; embedding; final norm.
    assert report["parameters"] == LAYERS * (LAYER + 2 * 1024 + 2 * 128) + \
        VOCAB * 1024 + 1024
    assert report["tokens_per_step"] == tokens
    step = report["step_seconds"]
    assert len(step["all"]) == report["steps"] == 3
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert report["tokens_per_second"] == pytest.approx(
        tokens / step["median"])
    assert report["model_tflops_per_gpu"] == pytest.approx(
        flops["total"] / step["median"] / 2 * 1e-12)
    # The daemon's planes are there while ranks say what they hold.
    assert report["host_segment_bytes"] > 12 * report["parameters"]
    assert report["host_pss_peak_bytes"] > report["host_segment_bytes"]
    assert report["device_peak_bytes"] > 0
    for lane in ("deliver", "compute", "drain", "update", "offload"):
        assert report["lane_busy_seconds"][lane] > 0
    assert report["exposed_seconds"]["compute_stall"] >= 0
    # Uniform over the vocabulary at the start, to within what 0.02 gives.
    assert report["first_loss"] == pytest.approx(7.6, abs=0.3)
    assert report["last_loss"] < report["first_loss"] + 0.1
    assert report["exposed_seconds"]["offload_wait"] > 0
    assert report["plan"]["ranks"] == 2
    assert report["plan"]["offload_permille"] == [500] * LAYERS
    assert "bench --model qwen3-0.6b" in report["command"]

    reference = report["reference"]
    assert reference["bench"] == "compute-only-qwen3-0.6b"
    assert reference["detail"]["model_flops_per_step"] == pytest.approx(
        flops["total"] / 2)
    assert report["excess_over_reference"] == pytest.approx(
        step["median"] / reference["detail"]["step_seconds"]["median"] - 1)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_uses_the_daemon_that_answers(daemon, binaries, tmp_path):
    before = daemon.json("status", "--all")["jobs"]
    result = subprocess.run(
        [*command(binaries), "--socket", daemon.socket, "-o", "json"],
        timeout=300, capture_output=True, text=True,
        env=surroundings(tmp_path))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 3
    jobs = daemon.json("status", "--all")["jobs"]
    assert len(jobs) == len(before) + 1
    assert jobs[-1]["name"] == "bench-qwen3-0.6b"
    assert jobs[-1]["state"] == "COMPLETED"
    assert jobs[-1]["host_pss_peak_bytes"] > 0


def test_interrupt_leaves_nothing(binaries, tmp_path):
    if os.path.exists("/run/slidedpd/slidedpd.sock"):
        pytest.skip("this host has a system daemon")
    bench = subprocess.Popen(
        command(binaries, steps=100000), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=surroundings(tmp_path))
    folder = str(tmp_path / "tmp")
    # Lines of progress: the job runs.
    for line in bench.stderr:
        if line.startswith("step 1/"):
            break
    assert len(processes_with(folder)) >= 2  # daemon and ranks
    bench.send_signal(signal.SIGINT)
    _, err = bench.communicate(timeout=100)
    assert bench.returncode == 130, err
    assert "interrupted" in err
    wait_for("processes to end", lambda: not processes_with(folder))
    assert os.listdir(folder) == []
