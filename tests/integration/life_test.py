"""A job's life: what it leaves, what it says."""

import json
import subprocess

import numpy as np
import pytest
from conftest import memfds, read_safetensors, wait_for


@pytest.mark.parametrize("case", ["llama_tied", "qwen3_untied"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_output_is_the_source_with_new_weights(daemon, make_job, case, ranks):
    job = make_job(case)
    job_id = daemon.submit(job.spec(ranks=ranks), "--wait")
    shown = daemon.json("show", job_id)
    assert shown["job"]["state"] == "COMPLETED"
    output = job.folder / "output"
    before = read_safetensors(job.model / "model.safetensors", widen=False)
    after = read_safetensors(output / "model.safetensors", widen=False)
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.shape == after[name].shape
    assert any(not np.array_equal(before[n], after[n]) for n in before)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (output / name).read_bytes() == (job.model / name).read_bytes()
    assert sorted(p.name for p in job.folder.iterdir()) == \
        ["data.safetensors", "model", "output"]
    assert memfds(daemon.process.pid) == 0


def test_steps_are_recorded_and_followed(daemon, make_job):
    job = make_job()
    result = daemon.call("submit", write(job, job.spec(steps=5)), "--follow")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    job_id = lines[0]["id"]
    shown = daemon.json("show", job_id)
    with open(f"{shown['log_folder']}/metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    for record in records:
        assert np.isfinite(record["loss"]) and record["grad_norm"] > 0
        assert record["valid_tokens"] == 4 * (job.length - 1)
        assert record["compute_ns"] > 0
    assert "rank 0" in daemon.call("logs", job_id).stdout or \
        daemon.call("logs", job_id).stdout


def write(job, spec):
    path = job.folder / "job.yaml"
    path.write_text(json.dumps(spec))
    return path


def test_two_runs_give_the_same_bytes(daemon, make_job):
    outputs = []
    for _ in range(2):
        job = make_job("qwen2_tied")
        daemon.submit(job.spec(deterministic=True), "--wait")
        outputs.append((job.folder / "output/model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]


def test_workers_may_be_started_by_hand(daemon, make_job):
    job = make_job()
    job_id = daemon.submit(job.spec(launch="manual"))
    wait_for("configuring", lambda: daemon.job(job_id)["state"]
             in ("CONFIGURING", "RUNNING"))
    workers = [
        subprocess.Popen([daemon.binaries / "slidedp-worker",
                          "--job", str(job_id), "--rank", str(rank),
                          "--socket", daemon.socket],
                         stderr=subprocess.DEVNULL)
        for rank in range(max(job.ranks(1, 2)))]
    assert all(worker.wait(60) == 0 for worker in workers)
    wait_for("completed", lambda: daemon.job(job_id)["state"]
             == "COMPLETED")


def test_cancel_frees_everything(daemon, make_job):
    job = make_job()
    job_id = daemon.submit(job.spec(steps=100000))
    wait_for("a step", lambda: daemon.job(job_id)["step"] > 0)
    daemon.call("cancel", job_id)
    wait_for("cancelled", lambda: daemon.job(job_id)["state"]
             == "CANCELLED")
    wait_for("segments gone", lambda: memfds(daemon.process.pid) == 0)
    assert not (job.folder / "output").exists()


def test_drain_holds_jobs_back(daemon, make_job):
    daemon.call("drain", "--reason", "new disks")
    job = make_job()
    job_id = daemon.submit(job.spec())
    status = daemon.job(job_id)
    assert status["state"] == "PENDING" and "new disks" in status["reason"]
    daemon.kill()
    daemon.start()
    status = daemon.job(job_id)
    assert status["state"] == "PENDING" and "new disks" in status["reason"]
    daemon.call("undrain")
    wait_for("completed", lambda: daemon.job(job_id)["state"]
             == "COMPLETED", 60)


def test_segments_are_as_estimated_and_pss_close(daemon, make_job, device):
    """Segments to the byte; PSS of all processes at most 2 % + 64 MiB above."""
    if device != "cpu":
        pytest.skip("what CUDA takes of the host is not ours to estimate")
    job = make_job("llama_tied", sequences=64, length=128)
    wide = {"hidden_size": 512, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64,
            "intermediate_size": 2048, "num_hidden_layers": 6,
            "vocab_size": 16384}
    job.config(**wide)

    def grow(tensors):
        rng = np.random.default_rng(0)
        h, inner = wide["hidden_size"], wide["intermediate_size"]
        q, kv = 8 * 64, 4 * 64
        shapes = {"model.embed_tokens.weight": (wide["vocab_size"], h),
                  "model.norm.weight": (h,)}
        for layer in range(wide["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            shapes |= {p + "input_layernorm.weight": (h,),
                       p + "post_attention_layernorm.weight": (h,),
                       p + "self_attn.q_proj.weight": (q, h),
                       p + "self_attn.k_proj.weight": (kv, h),
                       p + "self_attn.v_proj.weight": (kv, h),
                       p + "self_attn.o_proj.weight": (h, q),
                       p + "mlp.gate_proj.weight": (inner, h),
                       p + "mlp.up_proj.weight": (inner, h),
                       p + "mlp.down_proj.weight": (h, inner)}
        return {name: ((rng.standard_normal(shape) * 0.02).astype(np.float32)
                       .view(np.uint32) >> 16).astype(np.uint16)
                for name, shape in shapes.items()}

    job.weights(grow)
    estimate = daemon.json(
        "estimate", job.model, "--ranks", 2, "--device", "cpu",
        "--sequence-length", job.length, "--batch-size", 4,
        "--micro-batch-size", 1, "--max-grad-norm", 1.0)
    job_id = daemon.submit(job.spec(steps=1000))
    wait_for("steps", lambda: daemon.job(job_id)["step"] >= 2, 120)
    shown = daemon.json("show", job_id)
    assert shown["host_bytes"] == estimate["host_segments"]
    pss, libraries = pss_bytes(daemon)
    daemon.call("cancel", job_id)
    bound = estimate["host_bytes_with_cpu_ranks"]
    assert bound * 0.8 <= pss <= bound * 1.02 + (64 << 20) + libraries, \
        f"PSS {pss}, estimate {bound}, CUDA's libraries {libraries}"


def pss_bytes(daemon):
    """Of all processes; and what CUDA's libraries may take of it, whose
    relocated tables each process that links them has for itself."""
    from conftest import children
    total = libraries = 0
    for pid in [daemon.process.pid, *children(daemon.process.pid)]:
        for line in open(f"/proc/{pid}/smaps_rollup"):
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
        if "libcublasLt" in open(f"/proc/{pid}/maps").read():
            libraries += 160 << 20
    return total, libraries
