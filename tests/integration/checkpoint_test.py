"""Checkpoints while a job trains, and jobs that go on from them: to the bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import Daemon, processes_with, read_safetensors, wait_for

ENDED = ("COMPLETED", "FAILED", "CANCELLED")
MODES = {"eager": {"max_grad_norm": None},
         "deferred": {"update": "deferred", "max_grad_norm": 0.5},
         "speculative": {"update": "speculative", "max_grad_norm": 0.5}}


def state_of(folder):
    """Every byte of a checkpoint that training made."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()
             if path.suffix == ".safetensors"}
    assert any(name.startswith("state-") for name in files)
    return files


def weights_of(folder):
    """The exact float32 weights, by tensor, from `slidedpctl export`."""
    return read_safetensors(folder / "model.safetensors", widen=False)


def spec_of(job, name, **changes):
    """A job that saves into a folder of its own."""
    changes.setdefault("checkpoint", {"every_steps": 5, "keep": 2})
    return job.spec(output=str(job.folder / name), **changes)


def checkpoints(job, name):
    return job.folder / f"{name}.checkpoints"


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-"))
                  for path in folder.iterdir()
                  if path.name.startswith("step-"))


def hidden_in(folder):
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def ended(daemon, job_id, seconds=120):
    return wait_for(f"job {job_id} over",
                    lambda: (lambda s: s if s["state"] in ENDED else None)(
                        daemon.job(job_id)), seconds)


def events(daemon, job_id):
    return [event["text"] for event in daemon.json("show", job_id)["events"]]


def workers(daemon, rank=None):
    text = f"--socket\0{daemon.socket}"
    found = [pid for pid in processes_with(text)
             if pid != daemon.process.pid]
    if rank is not None:
        ranked = processes_with(f"--rank\0{rank}\0")
        found = [pid for pid in found if pid in ranked]
    return found


def kill(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def metrics(daemon, job_id):
    folder = daemon.json("show", job_id)["log_folder"]
    with open(f"{folder}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_put_back_and_gone_on_is_bitwise(daemon, make_job, mode, ranks):
    """A clean stop: `drain --stop` saves the job wherever it is."""
    job = make_job("qwen3_untied")
    steps = 200
    common = dict(MODES[mode], steps=steps, ranks=ranks, deterministic=True,
                  checkpoint={"every_steps": steps})
    daemon.submit(spec_of(job, "whole", **common), "--wait")
    job_id = daemon.submit(spec_of(job, "parts", **common))
    wait_for("some steps", lambda: daemon.job(job_id)["step"] > 10)
    daemon.call("drain", "--stop", "--reason", "new disks")
    stopped = wait_for("put back", lambda: (
        lambda s: s if s["state"] == "PENDING" else None)(daemon.job(job_id)))
    assert "new disks" in stopped["reason"]
    saved = steps_in(checkpoints(job, "parts"))
    assert len(saved) == 1 and 10 < saved[0] < steps
    daemon.call("undrain")
    after = ended(daemon, job_id)
    assert after["state"] == "COMPLETED", after
    assert after["first_step"] == saved[0] and after["attempts"] == 2
    assert after["retries_used"] == 0
    last = f"step-{steps:08}"
    assert state_of(checkpoints(job, "whole") / last) == \
        state_of(checkpoints(job, "parts") / last)
    assert (job.folder / "whole/model.safetensors").read_bytes() == \
        (job.folder / "parts/model.safetensors").read_bytes()
    # Each step is told of once, whoever made it.
    assert [record["step"] for record in metrics(daemon, job_id)] == \
        list(range(1, steps + 1))


@pytest.fixture
def seed():
    value = int(os.environ.get("SLIDEDP_TEST_SEED", time.time_ns() & 0xffffffff))
    print(f"seed {value} (SLIDEDP_TEST_SEED)")
    return value


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_anywhere_ends_in_the_same_bits(daemon, make_job, request, seed,
                                               ranks):
    """Worker, daemon, or both, at random moments of one job's life."""
    kills = max(1, request.config.getoption("--resume-kills") // 2)
    rng = random.Random(seed + ranks)
    job = make_job("qwen3_untied")
    steps = 120 * kills
    common = dict(MODES[rng.choice(list(MODES))], steps=steps, ranks=ranks,
                  deterministic=True, retries=1000,
                  checkpoint={"every_steps": 20, "keep": 2})
    daemon.submit(spec_of(job, "whole", **common), "--wait")
    job_id = daemon.submit(spec_of(job, "killed", **common))
    done = 0
    while done < kills and daemon.job(job_id)["state"] not in ENDED:
        time.sleep(rng.random() * 0.8)
        what = rng.choice(("worker", "daemon", "both"))
        if what in ("worker", "both"):
            found = workers(daemon, rng.randrange(ranks))
            kill(found)
            if not found and what == "worker":
                continue
        if what in ("daemon", "both"):
            daemon.kill()
            wait_for("no worker left", lambda: not workers(daemon))
            daemon.start()
        done += 1
    assert done >= kills // 2, "the job was too short"
    after = ended(daemon, job_id, 300)
    assert after["state"] == "COMPLETED", after
    last = f"step-{steps:08}"
    assert state_of(checkpoints(job, "whole") / last) == \
        state_of(checkpoints(job, "killed") / last)
    assert (job.folder / "whole/model.safetensors").read_bytes() == \
        (job.folder / "killed/model.safetensors").read_bytes()
    assert not hidden_in(checkpoints(job, "killed"))
    assert [record["step"] for record in metrics(daemon, job_id)] == \
        list(range(1, steps + 1))


def test_goes_on_with_other_ranks(daemon, make_job, tmp_path):
    """From 2 ranks to 1 and to 4: the same but for the order of additions."""
    job = make_job("qwen3_untied", sequences=16)
    common = dict(steps=10, ranks=2, batch_size=8, max_grad_norm=None,
                  compute_dtype="fp32")
    daemon.submit(spec_of(job, "two", **common), "--wait")
    start = checkpoints(job, "two") / "step-00000005"

    def exported(checkpoint, name):
        to = tmp_path / name
        daemon.call("export", checkpoint, "-o", to, "--dtype", "float32")
        return weights_of(to)

    before = exported(start, "before")
    two = exported(checkpoints(job, "two") / "step-00000010", "two")
    way = sum(np.square(two[n].astype(float) - before[n]).sum() for n in two)
    assert way > 0
    for ranks in job.ranks(1, 4):
        name = f"ranks{ranks}"
        job_id = daemon.submit(
            spec_of(job, name, **{**common, "ranks": ranks}),
            "--resume", start, "--wait")
        assert daemon.job(job_id)["first_step"] == 5
        other = exported(checkpoints(job, name) / "step-00000010", name)
        apart = sum(np.square(two[n].astype(float) - other[n]).sum()
                    for n in two)
        # Of what five steps changed. A gradient that another order of additions
        # rounds to the other side moves by 2^-9, and few do.
        assert apart <= 1e-4 * way, (ranks, apart / way)


def test_the_daemons_stop_saves_and_its_start_goes_on(daemon, make_job):
    job = make_job()
    steps = 400
    job_id = daemon.submit(spec_of(job, "output", steps=steps, checkpoint={}))
    wait_for("some steps", lambda: daemon.job(job_id)["step"] > 5)
    assert daemon.stop() == 0
    assert not workers(daemon)
    saved = steps_in(checkpoints(job, "output"))
    assert len(saved) == 1
    daemon.start()
    after = ended(daemon, job_id)
    assert after["state"] == "COMPLETED", after
    assert after["first_step"] == saved[0] > 5
    assert after["retries_used"] == 0
    assert any("slidedpd stopped" in text for text in events(daemon, job_id))


def test_retries_are_spent_and_then_the_job_fails(daemon, make_job):
    job = make_job()
    job_id = daemon.submit(spec_of(job, "output", steps=1000000, retries=2))
    for attempt in (1, 2, 3):
        wait_for(f"attempt {attempt} trains", lambda: (
            lambda s: s["attempts"] == attempt and s["state"] == "RUNNING" and
            s["step"] > s["first_step"] + 5)(daemon.job(job_id)), 60)
        kill(workers(daemon, 0))
        if attempt < 3:
            wait_for("another attempt", lambda: daemon.job(job_id)["attempts"]
                     > attempt, 60)
    after = ended(daemon, job_id)
    assert after["state"] == "FAILED" and "rank 0" in after["reason"], after
    assert after["retries_used"] == 2 and after["first_step"] > 0
    assert any("restart 2 of 2" in text for text in events(daemon, job_id))


def test_on_demand_verified_and_exported(daemon, make_job, tmp_path):
    job = make_job("llama_tied")
    job_id = daemon.submit(spec_of(job, "output", steps=100000, checkpoint={}))
    wait_for("a step", lambda: daemon.job(job_id)["step"] > 0)
    shown = daemon.json("checkpoint", job_id, "--wait")["job"]["checkpoint"]
    saved = job.folder / "output.checkpoints" / f"step-{shown['step']:08}"
    assert shown["path"] == str(saved) and shown["failures_in_a_row"] == 0
    before = daemon.job(job_id)["step"]
    wait_for("it trains on", lambda: daemon.job(job_id)["step"] > before)
    daemon.call("export", job_id, "-o", tmp_path / "by-id")
    daemon.call("cancel", job_id, "--wait")
    for name in ("config.json", "tokenizer.json"):
        assert (saved / name).read_bytes() == (job.model / name).read_bytes()

    assert daemon.json("verify", saved)["problems"] == []
    daemon.call("export", saved, "-o", tmp_path / "exact", "--dtype",
                "float32")
    source = read_safetensors(job.model / "model.safetensors", widen=False)
    halves = read_safetensors(tmp_path / "by-id/model.safetensors",
                              widen=False)
    exact = weights_of(tmp_path / "exact")
    assert list(source) == list(halves) == list(exact)
    for name in source:
        assert exact[name].dtype == np.float32
        # The upper half is the nearest, ties away from zero.
        bits = exact[name].view(np.uint32)
        assert np.array_equal(halves[name].view(np.uint16),
                              ((bits + 0x8000) >> 16).astype(np.uint16))

    # The output is the same export of the last step.
    done = daemon.submit(spec_of(job, "done", steps=5), "--wait")
    daemon.call("export", done, "-o", tmp_path / "done")
    assert (tmp_path / "done/model.safetensors").read_bytes() == \
        (job.folder / "done/model.safetensors").read_bytes()

    for path in sorted(saved.iterdir()):
        good = path.read_bytes()
        for at in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[at] ^= 0x10
            path.write_bytes(bytes(bad))
            result = daemon.call("verify", saved, check=False)
            assert result.returncode == 1, (path, at)
            assert path.name in result.stdout, (path, at, result.stdout)
        path.write_bytes(good[:-1])
        result = daemon.call("verify", saved, check=False)
        # The manifest's last byte is the end of its line.
        assert result.returncode == (path.name != "manifest.json"), path
        path.write_bytes(good)
    assert daemon.json("verify", saved)["problems"] == []


def test_a_damaged_one_is_passed_over(daemon, make_job):
    job = make_job()
    daemon.submit(spec_of(job, "first", steps=10), "--wait")
    folder = checkpoints(job, "first")
    assert steps_in(folder) == [5, 10]
    good = state_of(folder / "step-00000010")
    victim = folder / "step-00000010/state-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    # Named, it is an error that names the file.
    own = {"every_steps": 5, "folder": str(folder)}
    result = daemon.submit(
        spec_of(job, "named", steps=10), "--resume", folder / "step-00000010",
        "--wait", check=False)
    failed = daemon.job(result)
    assert failed["state"] == "FAILED"
    assert "state-00001.safetensors" in failed["reason"], failed
    # Without --resume, a folder with checkpoints is not for a new job.
    result = daemon.submit(spec_of(job, "again", steps=10, checkpoint=own),
                           check=False)
    assert "holds checkpoints of an earlier job" in result.stderr
    # The one before is taken, and leads to the same.
    job_id = daemon.submit(spec_of(job, "again", steps=10, checkpoint=own),
                           "--resume", "auto", "--wait")
    assert daemon.job(job_id)["first_step"] == 5
    assert "state-00001.safetensors" in daemon.call("logs", job_id).stdout
    assert state_of(folder / "step-00000010") == good
    assert (folder / "aside-step-00000010").exists()


def test_another_sampler_is_refused(daemon, make_job):
    job = make_job()
    daemon.submit(spec_of(job, "first", steps=5), "--wait")
    saved = checkpoints(job, "first") / "step-00000005"
    result = daemon.submit(spec_of(job, "other", steps=10, seed=43),
                           "--resume", saved, check=False)
    assert result.returncode == 1 and "seed was 42, is 43" in result.stderr
    # Another learning rate is the user's choice, and told of.
    job_id = daemon.submit(
        spec_of(job, "other", steps=10, optimizer={"lr": 1e-4}),
        "--resume", saved, "--wait")
    assert any("optimizer was" in text for text in events(daemon, job_id))


def test_a_full_disk_fails_the_checkpoint_not_the_job(daemon, make_job):
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs to mount a small file system")
    job = make_job("qwen3_untied")
    daemon.submit(spec_of(job, "size", steps=5), "--wait")
    saved = checkpoints(job, "size") / "step-00000005"
    size = sum(path.stat().st_size for path in saved.iterdir())
    disk = job.folder / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o",
                           f"size={size * 3 // 2}", "tmpfs", disk])
    if made.returncode != 0:
        pytest.skip("may not mount a small file system")
    try:
        job_id = daemon.submit(spec_of(
            job, "output", steps=20,
            checkpoint={"every_steps": 5, "keep": 1,
                        "folder": str(disk / "checkpoints")}), "--wait")
        after = daemon.job(job_id)
        assert after["state"] == "COMPLETED", after
        assert after["checkpoint"]["step"] == 5
        assert after["checkpoint"]["failures_in_a_row"] == 3
        assert "are free; make room" in after["checkpoint"]["last_failure"]
        assert steps_in(disk / "checkpoints") == [5]
        assert not hidden_in(disk / "checkpoints")
        assert daemon.json("verify", after["checkpoint"]["path"])[
            "problems"] == []
        assert any("3 in a row" in text for text in events(daemon, job_id))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_jobs_without_checkpoints_still_end_with_the_daemon(
        binaries, tmp_path, make_job):
    (tmp_path / "own").mkdir()
    daemon = Daemon(binaries, tmp_path / "own")
    try:
        job = make_job()
        spec = job.spec(steps=1000000, random_weights_seed=1)
        del spec["output"]
        job_id = daemon.submit(spec)
        wait_for("a step", lambda: daemon.job(job_id)["step"] > 0)
        result = daemon.call("checkpoint", job_id, check=False)
        assert result.returncode == 6 and "checkpoint.folder" in result.stderr
        assert daemon.stop() == 0
        daemon.start()
        assert daemon.job(job_id)["state"] == "FAILED"
    finally:
        daemon.stop()


def test_random_weights_are_saved_too(daemon, make_job):
    """A job without output or model files, but with a folder to save in."""
    job = make_job()
    spec = job.spec(steps=10, random_weights_seed=1,
                    checkpoint={"every_steps": 5,
                                "folder": str(job.folder / "saved")})
    del spec["output"]
    daemon.submit(spec, "--wait")
    good = state_of(job.folder / "saved/step-00000010")
    shutil.rmtree(job.folder / "saved/step-00000010")
    job_id = daemon.submit(spec, "--resume", "auto", "--wait")
    assert daemon.job(job_id)["first_step"] == 5
    assert state_of(job.folder / "saved/step-00000010") == good
    assert daemon.json("verify", job.folder / "saved/step-00000010")[
        "problems"] == []
