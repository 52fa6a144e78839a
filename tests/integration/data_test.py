"""Data sets: packing, mixtures and how long to train, through the daemon."""

import json

import numpy as np
import pytest
from conftest import write_dataset
from input_test import refused


def steps_of(daemon, job_id):
    shown = daemon.json("show", job_id)
    assert shown["job"]["state"] == "COMPLETED"
    with open(f"{shown['log_folder']}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


@pytest.fixture
def documents(make_job):
    """A job over documents of 2 to 24 tokens, and one of 60."""
    job = make_job()
    rng = np.random.default_rng(2)
    lengths = [*rng.integers(2, 25, 30), 60]
    job.offsets = np.concatenate([[0], np.cumsum(lengths)])
    job.ids = rng.integers(0, 256, job.offsets[-1])
    job.mask = rng.integers(0, 2, job.offsets[-1])
    write_dataset(job.data, job.ids, job.mask, job.offsets, "documents")
    return job


@pytest.mark.parametrize("dtype,bound", [("fp32", 1e-5), ("bf16", 2.0 ** -7)])
def test_packed_documents_have_the_loss_of_each_alone(daemon, documents, dtype,
                                                      bound):
    if dtype == "bf16" and documents.device == "cpu":
        pytest.skip("CPU ranks compute in float32")
    losses = {}
    for packing in (True, False):
        spec = documents.spec(packing=packing, epochs=1, batch_size=64,
                              compute_dtype=dtype,
                              output=str(documents.folder / f"{packing}"))
        del spec["steps"]
        step, = steps_of(daemon, daemon.submit(spec, "--wait"))
        losses[packing] = step["loss"], step["valid_tokens"]
    assert losses[True][1] == losses[False][1] > 100
    assert losses[True][0] == pytest.approx(losses[False][0], rel=bound)


def test_a_mixture_is_read_alike_on_any_number_of_ranks(daemon, documents,
                                                        tmp_path):
    other = tmp_path / "other.safetensors"
    ids = np.arange(240) % 256
    write_dataset(other, ids, np.ones(240), np.arange(11) * 24)
    runs = []
    for ranks in documents.ranks(1, 2, 4):
        spec = documents.spec(
            data=[{"path": str(documents.data), "weight": 0.75},
                  {"path": str(other), "weight": 0.25}],
            packing=True, ranks=ranks, max_tokens=300, compute_dtype="fp32",
            output=str(documents.folder / f"out{ranks}"))
        del spec["steps"]
        runs.append(steps_of(daemon, daemon.submit(spec, "--wait")))
    # 4 sequences of at most 24 tokens a step.
    assert 4 <= len(runs[0]) <= 6
    for run in runs[1:]:
        assert [s["valid_tokens"] for s in run] == [
            s["valid_tokens"] for s in runs[0]]
        assert [s["loss"] for s in run] == pytest.approx(
            [s["loss"] for s in runs[0]], rel=1e-4)


def test_dry_run_says_what_a_step_holds(daemon, documents):
    for packing, padding in ((True, (0, 0.1)), (False, (0.2, 0.7))):
        file = documents.folder / "job.yaml"
        file.write_text(json.dumps(documents.spec(packing=packing)))
        planned = json.loads(daemon.call("submit", file, "--dry-run").stdout)
        data = planned["data"]
        assert padding[0] <= data["padding_share"] <= padding[1]
        assert data["tokens_per_step"] == pytest.approx(
            4 * 24 * (1 - data["padding_share"]))
        assert planned["plan"]["documents_per_sequence"] > 0 or not packing
        warned = any("packing: true" in w for w in planned["warnings"])
        assert warned != packing


@pytest.mark.parametrize("change,parts", [
    (lambda job: job.offsets.__setitem__(3, job.offsets[2]),
     ("doc_offsets[3]", "not above")),
    (lambda job: job.offsets.__setitem__(-1, job.offsets[-1] + 1),
     ("doc_offsets[31]", "number of tokens")),
    (lambda job: job.offsets.__setitem__(5, 1 << 60),
     ("doc_offsets[6]", "not above")),
    (lambda job: job.ids.__setitem__(9, 256), ("input_ids[9]", "256")),
], ids=["ascending", "end", "huge", "token"])
def test_hostile_documents_are_one_error(daemon, documents, change, parts):
    change(documents)
    write_dataset(documents.data, documents.ids, documents.mask,
                  documents.offsets, "documents")
    message = refused(daemon, documents, packing=True)
    assert "data.safetensors" in message and "slidedp-prepare" in message or (
        "tokenizer" in message)
    assert all(part in message for part in parts)
