"""kill -9 at random moments: nothing hangs, nothing is left, nothing that was
acknowledged is lost."""

import os
import random
import signal
import time

import pytest
from conftest import children, memfds, processes_with, wait_for

ENDED = ("COMPLETED", "FAILED", "CANCELLED")


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def workers(daemon, rank=None):
    text = f"--socket\0{daemon.socket}"
    found = processes_with(text)
    if rank is not None:
        ranked = processes_with(f"--rank\0{rank}\0")
        found = [pid for pid in found if pid in ranked]
    return [pid for pid in found if pid != daemon.process.pid]


@pytest.fixture
def seed():
    value = int(os.environ.get("SLIDEDP_TEST_SEED", time.time_ns() & 0xffffffff))
    print(f"seed {value} (SLIDEDP_TEST_SEED)")
    return value


def test_killed_workers(daemon, make_job, request, seed):
    rng = random.Random(seed)
    count = request.config.getoption("--kills") // 2
    job = make_job()
    for i in range(count):
        output = job.folder / f"output{i}"
        job_id = daemon.submit(job.spec(steps=200, output=str(output)))
        rank = rng.randrange(2)
        wait_for("a worker", lambda: workers(daemon, rank))
        time.sleep(rng.random() * 0.5)
        victims = workers(daemon, rank)
        for pid in victims:
            kill(pid)
        status = wait_for(
            f"job {job_id} over",
            lambda: (lambda s: s if s["state"] in ENDED else None)(
                daemon.job(job_id)))
        if status["state"] == "FAILED":
            assert "rank" in status["reason"], status
            assert not output.exists()
        else:
            assert status["state"] == "COMPLETED" and output.exists(), status
        wait_for("no worker left", lambda: not workers(daemon))
        assert not children(daemon.process.pid)
        wait_for("segments gone", lambda: memfds(daemon.process.pid) == 0)
        wait_for("no half-written output", lambda: not [
            p for p in job.folder.iterdir() if p.name.startswith(".")])


def test_killed_daemons(daemon, make_job, request, seed):
    rng = random.Random(seed)
    count = request.config.getoption("--kills") - \
        request.config.getoption("--kills") // 2
    job = make_job()
    acknowledged, cancelled = [], set()
    for i in range(count):
        job_id = daemon.submit(
            job.spec(steps=200, output=str(job.folder / f"output{i}")))
        acknowledged.append(job_id)
        if rng.random() < 0.3:
            victim = rng.choice(acknowledged)
            result = daemon.call("cancel", victim, check=False)
            if result.returncode == 0:
                cancelled.add(victim)
        time.sleep(rng.random() * 0.5)
        daemon.kill()
        wait_for("no worker left", lambda: not workers(daemon))
        daemon.start()
        jobs = {j["id"]: j for j in daemon.json("status", "-a")["jobs"]}
        for known in acknowledged:
            assert known in jobs, f"job {known} is lost"
        for known in cancelled:
            assert jobs[known]["state"] in ("CANCELLED", "COMPLETED",
                                            "FAILED"), jobs[known]
        for known, info in jobs.items():
            if info["state"] == "FAILED":
                assert info["reason"], info
    for known in acknowledged:
        daemon.call("cancel", known, check=False)
    wait_for("all over", lambda: all(
        j["state"] in ENDED for j in daemon.json("status", "-a")["jobs"]), 60)
    wait_for("no worker left", lambda: not workers(daemon))
    assert memfds(daemon.process.pid) == 0
    wait_for("no half-written output", lambda: not [
        p for p in job.folder.iterdir() if p.name.startswith(".")])


def test_frozen_worker_is_noticed(binaries, tmp_path, make_job):
    from conftest import Daemon
    (tmp_path / "daemon").mkdir()
    daemon = Daemon(binaries, tmp_path / "daemon", "--lease-s", "2")
    try:
        job = make_job()
        job_id = daemon.submit(job.spec(steps=100000))
        wait_for("a step", lambda: daemon.job(job_id)["step"] > 0)
        os.kill(workers(daemon, 0)[0], signal.SIGSTOP)
        status = wait_for(
            "the job failed",
            lambda: (lambda s: s if s["state"] == "FAILED" else None)(
                daemon.job(job_id)))
        assert "rank 0" in status["reason"]
        wait_for("no worker left", lambda: not workers(daemon))
    finally:
        daemon.stop()


def test_stop_ends_everything(daemon, make_job):
    job = make_job()
    job_id = daemon.submit(job.spec(steps=100000))
    wait_for("a step", lambda: daemon.job(job_id)["step"] > 0)
    assert daemon.stop() == 0
    assert not workers(daemon)
    daemon.start()
    # It has been saved, and goes on.
    assert daemon.job(job_id)["state"] in ("PENDING", "CONFIGURING", "RUNNING")
    daemon.call("cancel", job_id, "--wait")
