"""Bad and unusual input: each has a stated behaviour and one clear message."""

import json

import numpy as np
import pytest
from conftest import read_safetensors, write_safetensors


def refused(daemon, job, **changes):
    result = daemon.submit(job.spec(**changes), check=False)
    assert not isinstance(result, int), "the job was taken"
    message = result.stderr.strip()
    assert len(message.splitlines()) == 1, message
    assert daemon.json("status")["jobs"] == []
    return message


def test_token_beyond_the_vocabulary(daemon, make_job):
    job = make_job()
    job.ids[70] = 256
    job.write_data()
    message = refused(daemon, job)
    assert "256" in message and "70" in message and "data.safetensors" in message


def test_negative_token(daemon, make_job):
    job = make_job()
    job.ids[3] = -5
    job.write_data()
    assert "-5" in refused(daemon, job)


def test_all_labels_masked(daemon, make_job):
    job = make_job()
    job.mask[:] = 0
    job.write_data()
    assert "loss_mask" in refused(daemon, job)


def test_a_step_without_labels_is_skipped_and_said(daemon, make_job):
    job = make_job()
    job.mask[:] = 0
    job.mask[:job.length] = 1  # one sequence of 8 has labels
    job.write_data()
    job_id = daemon.submit(job.spec(batch_size=2, steps=4), "--wait")
    shown = daemon.json("show", job_id)
    with open(f"{shown['log_folder']}/metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    skipped = [r for r in records if r["skipped"]]
    assert len(skipped) == 3 and all(r["skip_reason"] for r in skipped)
    assert sum(r["valid_tokens"] for r in records) == job.length - 1


@pytest.mark.parametrize("batch,ranks,micro", [(3, 2, 1), (5, 2, 2), (1, 2, 1)])
def test_batch_that_does_not_divide(daemon, make_job, batch, ranks, micro):
    """Places beyond the batch hold no labels: every label counts once."""
    job = make_job()
    job_id = daemon.submit(
        job.spec(batch_size=batch, ranks=ranks, micro_batch_size=micro,
                 steps=2), "--wait")
    shown = daemon.json("show", job_id)
    assert shown["job"]["state"] == "COMPLETED"
    with open(f"{shown['log_folder']}/metrics.jsonl") as file:
        for line in file:
            assert json.loads(line)["valid_tokens"] == batch * (job.length - 1)


def test_missing_tensors_are_all_named(daemon, make_job):
    job = make_job()
    gone = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    job.weights(lambda w: {k: v for k, v in w.items() if k not in gone})
    message = refused(daemon, job)
    assert all(name in message for name in gone)


def test_wrong_shape(daemon, make_job):
    job = make_job()
    name = "model.layers.1.mlp.down_proj.weight"
    job.weights(lambda w: {**w, name: np.ascontiguousarray(w[name].T)})
    message = refused(daemon, job)
    assert name in message and "128" in message


def test_unknown_architecture(daemon, make_job):
    job = make_job()
    job.config(architectures=["MambaForCausalLM"], model_type="mamba")
    assert "amba" in refused(daemon, job)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_dtypes_come_back_as_they_were(daemon, make_job, dtype):
    job = make_job()
    path = job.model / "model.safetensors"
    wide = read_safetensors(path)
    write_safetensors(path, {k: v.astype(dtype) for k, v in wide.items()},
                      {"format": "pt"})
    daemon.submit(job.spec(), "--wait")
    after = read_safetensors(job.folder / "output/model.safetensors")
    assert all(t.dtype == dtype for t in after.values())


def test_integer_weights_are_refused(daemon, make_job):
    job = make_job()
    name = "model.norm.weight"
    job.weights(lambda w: {**w, name: np.zeros(64, np.int32)})
    message = refused(daemon, job)
    assert name in message and "I32" in message


def test_tied_model_with_the_same_head_in_its_file(daemon, make_job):
    job = make_job()
    job.weights(lambda w: {**w, "lm_head.weight":
                           w["model.embed_tokens.weight"].copy()})
    daemon.submit(job.spec(), "--wait")
    after = read_safetensors(job.folder / "output/model.safetensors",
                             widen=False)
    assert np.array_equal(after["lm_head.weight"],
                          after["model.embed_tokens.weight"])


def test_tied_model_with_another_head_in_its_file(daemon, make_job):
    job = make_job()
    job.weights(lambda w: {**w, "lm_head.weight":
                           w["model.embed_tokens.weight"] ^ 1})
    job_id = daemon.submit(job.spec(), "--wait", check=False)
    status = daemon.job(job_id)
    assert status["state"] == "FAILED" and "lm_head.weight" in status["reason"]
    assert not (job.folder / "output").exists()


def test_non_finite_weight(daemon, make_job):
    job = make_job()

    def spoil(weights):
        weights = {k: v.copy() for k, v in weights.items()}
        weights["model.layers.0.mlp.up_proj.weight"][3, 5] = 0x7f80
        return weights

    job.weights(spoil)
    job_id = daemon.submit(job.spec(), "--wait", check=False)
    status = daemon.job(job_id)
    assert status["state"] == "FAILED"
    assert "model.layers.0.mlp.up_proj.weight" in status["reason"]


def test_output_that_exists(daemon, make_job):
    job = make_job()
    (job.folder / "output").mkdir()
    (job.folder / "output" / "mine").write_text("kept")
    assert "output" in refused(daemon, job)
    assert (job.folder / "output" / "mine").read_text() == "kept"


def test_cuda_in_a_build_without_it(daemon, make_job, device):
    if device == "cuda":
        pytest.skip("this build has it")
    job = make_job()
    result = daemon.submit(job.spec(device="cuda"), "--wait", check=False)
    if isinstance(result, int):
        status = daemon.job(result)
        assert status["state"] == "FAILED" and "CUDA" in status["reason"]
    else:
        assert "device = cuda" in result.stderr


def test_more_memory_than_there_is(daemon, make_job):
    job = make_job()
    job.config(vocab_size=1 << 24, hidden_size=1 << 14, head_dim=1 << 12)
    job.ids[:] = 1
    message = daemon.call("estimate", job.model, check=False)
    assert message.returncode == 0  # an estimate is only arithmetic
