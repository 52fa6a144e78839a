"""Jobs on GPUs, with real processes. Needs a build with CUDA and one GPU; what
needs two is skipped on one:

    python -m pytest tests/integration --device cuda --build BUNDLE
"""

import json
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import Daemon, memfds, read_safetensors, wait_for
from kill_test import workers

# Unit roundoff of BF16 is 2^-9 and a loss is a mean over tokens. What rounds
# differently (order of sums, number of ranks, routes) moves it far less than
# two units; a lost or doubled gradient, a stale weight or a wrong scale moves
# it more, at a learning rate that takes the loss down by more than that a step.
LOSS_BOUND = 2.0 ** -7

ENDED = ("COMPLETED", "FAILED", "CANCELLED")


@pytest.fixture(autouse=True)
def on_gpus(gpus):
    if not gpus:
        pytest.skip("--device cuda was not given")


@pytest.fixture
def two_gpus(gpus):
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")


def run(daemon, spec):
    """Runs a job to its end: (its records, what `show` says)."""
    job_id = daemon.submit(spec)
    wait_for("the end", lambda: daemon.job(job_id)["state"] in ENDED, 180)
    shown = daemon.json("show", job_id)
    assert shown["job"]["state"] == "COMPLETED", \
        shown["job"]["reason"] + daemon.call("logs", job_id).stdout
    with open(f"{shown['log_folder']}/metrics.jsonl") as file:
        return [json.loads(line) for line in file], shown


def losses(records):
    return np.array([record["loss"] for record in records])


def assert_close(found, wanted, bound):
    assert found.shape == wanted.shape
    error = np.max(np.abs(found - wanted) / np.abs(wanted))
    assert error <= bound, f"{found} instead of {wanted}: off by {error}"


def base(job, name, **changes):
    return job.spec(steps=5, output=str(job.folder / name), **changes)


def test_the_gpu_computes_what_the_cpu_does(daemon, make_job):
    """In float32 the two differ by the order of sums alone."""
    job = make_job("qwen3_untied")
    cpu, _ = run(daemon, base(job, "cpu", ranks=1, device="cpu"))
    gpu, shown = run(daemon, base(job, "gpu", ranks=1, compute_dtype="fp32"))
    assert shown["spec"]["device"] == "cuda"
    assert_close(losses(gpu), losses(cpu), 1e-4)
    norms = [np.array([r["grad_norm"] for r in records])
             for records in (gpu, cpu)]
    assert_close(*norms, 1e-3)
    half, _ = run(daemon, base(job, "half", ranks=1))
    assert_close(losses(half), losses(cpu), LOSS_BOUND)
    assert losses(cpu)[-1] < losses(cpu)[0] * (1 - LOSS_BOUND)


ALL_ROUTES = [(params, grads, reduce) for params in ("full", "sharded")
              for grads in ("gpu_root", "gpu_sharded", "cpu")
              for reduce in ("fp32", "bf16")]
SOME_ROUTES = [("full", "gpu_root", "fp32"), ("sharded", "gpu_sharded", "bf16"),
               ("full", "cpu", "bf16"), ("sharded", "gpu_root", "bf16")]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("case, clip, all_routes", [
    ("qwen3_untied", 1.0, ALL_ROUTES), ("qwen3_untied", None, SOME_ROUTES),
    ("llama_tied", 1.0, SOME_ROUTES), ("llama_tied", None, SOME_ROUTES)],
    ids=["untied-clipped", "untied-eager", "tied-clipped", "tied-eager"])
def test_routes_and_ranks_agree(daemon, make_job, case, clip, all_routes):
    job = make_job(case)
    alone, _ = run(daemon, base(job, "alone", ranks=1, max_grad_norm=clip))
    for params, grads, reduce in all_routes:
        routes = {"params": params, "grads": grads, "reduce": reduce}
        records, shown = run(
            daemon, base(job, "-".join(routes.values()), max_grad_norm=clip,
                         routes=routes))
        assert shown["plan"]["decoder"] == routes
        assert_close(losses(records), losses(alone), LOSS_BOUND)


@pytest.mark.parametrize("ranks", [1, 2])
def test_deterministic_jobs_repeat_bit_for_bit(daemon, make_job, gpus, ranks):
    if len(gpus) < ranks:
        pytest.skip("needs two GPUs")
    outputs = []
    for _ in range(2):
        job = make_job("qwen2_tied")
        run(daemon, job.spec(steps=8, ranks=ranks, deterministic=True))
        outputs.append((job.folder / "output/model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]


def test_auto_is_the_gpu(daemon, make_job, gpus):
    job = make_job()
    records, shown = run(daemon, job.spec(ranks=1, device="auto"))
    assert shown["spec"]["device"] == "cuda"
    assert gpus[0]["name"] in json.dumps(shown["events"])
    assert len(records) == 3
    peak = shown["job"]["device_peak_bytes"]
    assert 0 < peak <= gpus[0]["memory_bytes"]


def test_estimate_takes_the_gpus_memory(daemon, make_job, gpus):
    job = make_job()
    sizes = ["--ranks", 1, "--device", "cuda", "--sequence-length", job.length,
             "--batch-size", 4, "--max-grad-norm", 1.0]
    found = daemon.json("estimate", job.model, *sizes)
    smallest = min(gpu["memory_bytes"] for gpu in gpus)
    assert found["gpu_memory_bytes"] == smallest
    job_id = daemon.submit(job.spec(ranks=1), "--wait")
    shown = daemon.json("show", job_id)
    assert shown["host_bytes"] == found["host_segments"]


def state_is(daemon, job_id, *states):
    status = daemon.job(job_id)
    return status if status["state"] in states else None


@pytest.mark.usefixtures("two_gpus")
def test_a_killed_rank_ends_the_other_within_seconds(daemon, make_job):
    """Wherever it is: in a step, inside a collective, joining, loading."""
    seed = int(os.environ.get("SLIDEDP_TEST_SEED", time.time_ns() & 0xffffffff))
    print(f"seed {seed} (SLIDEDP_TEST_SEED)")
    rng = random.Random(seed)
    job = make_job()
    for i in range(6):
        job_id = daemon.submit(job.spec(
            steps=1000000, output=str(job.folder / f"output{i}")))
        rank = rng.randrange(2)
        if i % 2 == 0:
            wait_for("a step", lambda: daemon.job(job_id)["step"] > 0, 60)
        else:
            wait_for("a worker", lambda: workers(daemon, rank), 60)
        time.sleep(rng.random() * (0.5 if i % 2 == 0 else 6))
        for pid in workers(daemon, rank):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        status = wait_for("the job failed",
                          lambda: state_is(daemon, job_id, "FAILED"))
        assert f"rank {rank}" in status["reason"], status
        wait_for("no worker left", lambda: not workers(daemon))
        print(f"gone {time.monotonic() - killed:.1f} s after the kill")
        wait_for("segments gone", lambda: memfds(daemon.process.pid) == 0)


@pytest.mark.usefixtures("two_gpus")
def test_a_frozen_rank_does_not_hold_the_other(binaries, tmp_path, make_job):
    """The other one hangs inside an NCCL kernel when it is told to leave."""
    (tmp_path / "daemon").mkdir()
    daemon = Daemon(binaries, tmp_path / "daemon", "--lease-s", "3")
    try:
        job = make_job()
        job_id = daemon.submit(job.spec(steps=1000000))
        wait_for("a step", lambda: daemon.job(job_id)["step"] > 0, 60)
        os.kill(workers(daemon, 1)[0], signal.SIGSTOP)
        status = wait_for("the job failed",
                          lambda: state_is(daemon, job_id, "FAILED"), 30)
        assert "rank 1" in status["reason"]
        wait_for("no worker left", lambda: not workers(daemon))
    finally:
        daemon.stop()


def test_cancel_ends_workers_and_frees_memory(daemon, make_job, gpus):
    job = make_job()
    job_id = daemon.submit(job.spec(steps=1000000, ranks=min(2, len(gpus))))
    wait_for("a step", lambda: daemon.job(job_id)["step"] > 0, 60)
    daemon.call("cancel", job_id)
    wait_for("cancelled", lambda: state_is(daemon, job_id, "CANCELLED"), 15)
    wait_for("no worker left", lambda: not workers(daemon))
    wait_for("segments gone", lambda: memfds(daemon.process.pid) == 0)
    assert not (job.folder / "output").exists()


def test_more_ranks_than_gpus_are_refused_at_submit(daemon, make_job, gpus):
    job = make_job()
    for device in ("cuda", "auto"):
        result = daemon.submit(
            {**job.spec(device=device, batch_size=64), "ranks": len(gpus) + 1},
            check=False)
        assert not isinstance(result, int)
        assert f"ranks = {len(gpus) + 1}" in result.stderr, result.stderr


def test_jobs_wait_for_gpus(binaries, tmp_path, make_job, gpus):
    (tmp_path / "daemon").mkdir()
    daemon = Daemon(binaries, tmp_path / "daemon",
                    "--max-running-jobs", str(len(gpus) + 1))
    try:
        jobs = [daemon.submit(make_job().spec(ranks=1, steps=1000000))
                for _ in range(len(gpus) + 1)]
        for job_id in jobs[:-1]:
            wait_for("a step", lambda: daemon.job(job_id)["step"] > 0, 120)
        last = daemon.job(jobs[-1])
        assert last["state"] == "PENDING", last
        assert last["reason"].startswith("waiting for GPUs: needs 1, 0 of"), last
        daemon.call("cancel", jobs[0])
        wait_for("its turn", lambda: daemon.job(jobs[-1])["step"] > 0, 60)
    finally:
        daemon.stop()


def test_a_limit_that_leaves_nothing_is_refused_at_submit(daemon, make_job):
    job = make_job()
    result = daemon.submit(
        job.spec(ranks=1, tuning={"gpu_memory_limit_gib": 0.5}), check=False)
    assert not isinstance(result, int)
    assert "tuning.gpu_memory_limit_gib" in result.stderr, result.stderr


def test_a_limit_is_kept(daemon, make_job):
    job = make_job()
    _, shown = run(daemon, job.spec(ranks=1,
                                    tuning={"gpu_memory_limit_gib": 8}))
    assert shown["job"]["device_peak_bytes"] <= 8 << 30


def wide(job):
    """A model whose buffers are large beside its arithmetic."""
    job.config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=1,
               num_attention_heads=16, num_key_value_heads=16, head_dim=128,
               max_position_embeddings=1024)
    job.ids = np.random.default_rng(2).integers(0, 256, 8 * 1024)
    job.mask = np.ones(job.ids.shape)
    job.offsets = np.arange(9) * 1024
    job.length = 1024
    job.write_data()


def sequences_that_take(daemon, job, share):
    """The micro-batch whose buffers take that share of a GPU."""
    def take(count):
        found = daemon.json("estimate", job.model, "--ranks", 1, "--device",
                            "cuda", "--sequence-length", 1024, "--batch-size",
                            count, "--micro-batch-size", count,
                            "--set", "tuning.kept_layers=0")
        return found["device_bytes_per_rank"] / found["gpu_memory_bytes"]

    one, two = take(1), take(65)
    return int((share - one) / ((two - one) / 64)) + 1


def test_buffers_beyond_the_gpu_are_refused_at_submit(daemon, make_job):
    job = make_job()
    wide(job)
    count = sequences_that_take(daemon, job, 1.1)
    result = daemon.submit(
        job.spec(ranks=1, random_weights_seed=1, batch_size=count,
                 micro_batch_size=count, tuning={"kept_layers": 0}),
        check=False)
    assert not isinstance(result, int)
    assert f"micro_batch_size = {count}" in result.stderr, result.stderr
    assert "of device memory" in result.stderr


def test_a_gpu_that_another_has_filled_is_an_error_with_bytes(
        binaries, tmp_path, make_job):
    """Workers started by hand may choose a GPU that is taken."""
    (tmp_path / "daemon").mkdir()
    daemon = Daemon(binaries, tmp_path / "daemon", "--max-running-jobs", "2")
    started = []
    try:
        job = make_job()
        wide(job)
        count = sequences_that_take(daemon, job, 0.6)
        ids = []
        for name in ("first", "second"):
            job_id = daemon.submit(job.spec(
                ranks=1, steps=1000000, launch="manual", random_weights_seed=1,
                batch_size=count, micro_batch_size=count,
                tuning={"kept_layers": 0}, output=str(job.folder / name)))
            wait_for("its turn",
                     lambda: state_is(daemon, job_id, "CONFIGURING"))
            started.append(subprocess.Popen(
                [binaries / "slidedp-worker", "--job", str(job_id), "--rank",
                 "0", "--socket", daemon.socket],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"},
                stderr=subprocess.DEVNULL))
            ids.append(job_id)
            if name == "first":
                wait_for("a step", lambda: daemon.job(job_id)["step"] > 0, 180)
        status = wait_for("the second failed",
                          lambda: state_is(daemon, ids[1], "FAILED"), 120)
        assert "can't be allocated on" in status["reason"], status
        assert "are free" in status["reason"], status
        assert started[1].wait(30) == 1
        assert daemon.job(ids[0])["state"] == "RUNNING"
        daemon.call("cancel", ids[0])
        assert started[0].wait(30) == 3
    finally:
        for process in started:
            process.kill()
            process.wait()
        daemon.stop()
