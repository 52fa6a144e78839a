"""slidedpctl trace: a running job's next steps, all lanes on one clock."""

import collections
import json
import os
import signal
import subprocess
import time

import pytest
from conftest import wait_for

LANES = {"deliver", "activation", "compute", "reduce", "drain"}
# Within the spans of their lane.
WAITS = {"wait for a slot": {"forward"}, "wait for a reload": {"backward"},
         "wait for free chunks": {"drain"}}
# Between them.
DELIVER_WAITS = {"wait for a version", "wait for a window slot"}
UPDATES = {"update", "final update"}


@pytest.fixture
def running(daemon, make_job):
    """A function: a job that has made a step and will not end by itself."""

    def start(**changes):
        job_id = daemon.submit(make_job().spec(steps=1000000, **changes))
        wait_for("a step", lambda: daemon.job(job_id)["step"] > 0)
        return job_id

    return start


def read(path):
    """{process name: spans}, each a dict with begin and end in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events
             if e["ph"] == "M" and e["name"] == "process_name"}
    spans = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[names[event["pid"]]].append({
                "lane": event["cat"], "name": event["name"],
                "row": event["tid"], "step": event["args"]["step"],
                "unit": event["args"].get("unit", -1),
                "begin": event["ts"], "end": event["ts"] + event["dur"]})
    return spans


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_trace_of_two_ranks(daemon, running, tmp_path, max_grad_norm):
    job_id = running(ranks=2, max_grad_norm=max_grad_norm,
                     tuning={"keep": "selective", "offload": 1,
                             "ring_chunks": 1})
    path = tmp_path / "trace.json"
    daemon.call("trace", job_id, "--steps", 3, "-o", path)
    spans = read(path)
    assert set(spans) == {"rank 0", "rank 1", "slidedpd"}
    steps = sorted({s["step"] for s in spans["slidedpd"]})
    assert len(steps) == 3 and steps[-1] - steps[0] == 2

    for process, all_spans in spans.items():
        assert sorted({s["step"] for s in all_spans}) == steps, process
        frames = {s["step"]: s for s in all_spans if s["name"] == "step"}
        for span in all_spans:
            frame = frames[span["step"]]
            assert span["begin"] <= span["end"] <= frame["end"] + 1e-3
            assert span["name"] in DELIVER_WAITS or \
                frame["begin"] <= span["begin"], (process, span, frame)
        rows = collections.defaultdict(list)
        for span in all_spans:
            if span["name"] not in WAITS:
                rows[span["row"]].append((span["begin"], span["end"]))
                continue
            assert any(s["name"] in WAITS[span["name"]]
                       and s["unit"] == span["unit"]
                       and s["begin"] <= span["begin"] + 1e-3
                       and span["end"] <= s["end"] + 1e-3
                       for s in all_spans), span
        for row in rows.values():
            row.sort()
            assert all(a[1] <= b[0] + 1e-3 for a, b in zip(row, row[1:]))

    units = {s["unit"] for s in spans["slidedpd"] if s["unit"] >= 0}
    for rank in ("rank 0", "rank 1"):
        for step in steps:
            here = [s for s in spans[rank] if s["step"] == step]
            assert LANES <= {s["lane"] for s in here}
            waits = {"wait for a slot", "wait for a reload"} | DELIVER_WAITS
            if max_grad_norm is None:  # the gradients go through a ring
                waits.add("wait for free chunks")
            assert waits <= {s["name"] for s in here}
            assert {s["unit"] for s in here if s["lane"] == "deliver"} == units
    # The gate: an update of a unit comes before its next delivery, and after
    # the drain of its gradient has begun.
    updated = collections.defaultdict(float)
    for span in spans["slidedpd"]:
        if span["name"] in UPDATES:
            key = span["step"], span["unit"]
            updated[key] = max(updated[key], span["end"])
    assert {key[1] for key in updated} == units
    checked = 0
    for rank in ("rank 0", "rank 1"):
        for span in spans[rank]:
            key = span["step"] - 1, span["unit"]
            if span["name"] == "deliver" and key in updated:
                assert updated[key] <= span["begin"] + 1e-3
                checked += 1
    assert checked >= 2 * 2 * len(units)
    daemon.call("cancel", job_id)


def test_what_cannot_be_traced_is_said(daemon, running, make_job, tmp_path):
    path = tmp_path / "trace.json"

    def refused(code, words, *arguments):
        result = daemon.call("trace", *arguments, "-o", path, check=False)
        assert result.returncode == code, result.stderr
        assert words in result.stderr
        assert not path.exists()

    refused(3, "no job 77", 77)
    job_id = daemon.submit(make_job().spec(steps=2))
    wait_for("its end", lambda: daemon.job(job_id)["state"] == "COMPLETED")
    refused(6, "COMPLETED", job_id)
    refused(2, "1001", job_id, "--steps", 1001)
    running_id = running()
    refused_folder = tmp_path / "none" / "trace.json"
    result = daemon.call("trace", running_id, "-o", refused_folder, check=False)
    assert result.returncode == 1 and str(refused_folder) in result.stderr
    daemon.call("cancel", running_id)


def start_trace(daemon, job_id, path):
    """A client whose trace of 1000 steps has begun: another one is refused."""
    client = None

    def begun():
        nonlocal client
        # Refused itself if it came while the probe's own trace was running.
        if client is None or client.poll() is not None:
            client = subprocess.Popen(
                [daemon.binaries / "slidedpctl", "--socket", daemon.socket,
                 "trace", str(job_id), "--steps", "1000", "-o", path],
                stderr=subprocess.PIPE, text=True)
        probe = daemon.call("trace", job_id, "--steps", 1, "-o",
                            path.with_name("other.json"), check=False)
        return "already" in probe.stderr and client.poll() is None

    wait_for("the trace", begun)
    return client


def test_an_interrupted_trace_leaves_nothing(daemon, running, tmp_path):
    job_id = running()
    path = tmp_path / "trace.json"
    client = start_trace(daemon, job_id, path)
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=20)
    assert client.returncode == 130, errors
    assert not path.exists()
    # The next one is free to begin, and the job has not noticed.
    wait_for("the next trace", lambda: daemon.call(
        "trace", job_id, "--steps", 1, "-o", path,
        check=False).returncode == 0)
    assert daemon.job(job_id)["state"] == "RUNNING"
    daemon.call("cancel", job_id)


def test_a_trace_may_wait_for_training(daemon, make_job, tmp_path):
    job_id = daemon.submit(make_job().spec(steps=1000000, launch="manual"))
    path = tmp_path / "trace.json"
    early = daemon.call("trace", job_id, "-o", path, check=False)
    assert early.returncode == 6 and not path.exists(), early.stderr
    client = subprocess.Popen(
        [daemon.binaries / "slidedpctl", "--socket", daemon.socket,
         "trace", str(job_id), "--wait", "-o", path],
        stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    assert client.poll() is None
    daemon.call("cancel", job_id)
    _, errors = client.communicate(timeout=20)
    assert client.returncode == 6 and not path.exists(), errors
    # One that begins by itself.
    job_id = daemon.submit(make_job().spec(steps=1000000))
    daemon.call("trace", job_id, "--wait", "--steps", 1, "-o", path)
    assert path.exists()
    daemon.call("cancel", job_id)


def test_a_trace_ends_with_its_job(daemon, running, tmp_path):
    job_id = running()
    path = tmp_path / "trace.json"
    client = start_trace(daemon, job_id, path)
    daemon.call("cancel", job_id)
    _, errors = client.communicate(timeout=20)
    assert client.returncode == 6 and "ended" in errors, errors
    assert not path.exists()


def test_followed_logs_say_that_the_daemon_went(daemon, running):
    job_id = running()
    client = subprocess.Popen(
        [daemon.binaries / "slidedpctl", "--socket", daemon.socket, "logs", "-f",
         str(job_id)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert client.stdout.readline()
    os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.process.wait()
    daemon.start()
    _, errors = client.communicate(timeout=20)
    assert client.returncode == 5, errors
    assert "went away" in errors and f"logs {job_id}" in errors
