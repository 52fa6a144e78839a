"""What a user may ask of training beyond steps: schedules, frozen tensors,
evaluation, an early end, scalars for TensorBoard."""

import json
import struct

import numpy as np
from conftest import read_safetensors, write_dataset


def metrics(daemon, job_id):
    folder = daemon.json("show", job_id)["log_folder"]
    with open(f"{folder}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def held_out(job, sequences=3):
    path = job.folder / "held-out.safetensors"
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 256, sequences * job.length)
    write_dataset(path, ids, np.ones(ids.shape),
                  np.arange(sequences + 1) * job.length)
    return str(path)


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff


def events(path):
    """The records of an event file, checked."""
    rest = path.read_bytes()
    while rest:
        (size,), (crc,) = (struct.unpack("<Q", rest[:8]),
                           struct.unpack("<I", rest[8:12]))
        assert crc == masked(rest[:8])
        data = rest[12:12 + size]
        assert struct.unpack("<I", rest[12 + size:16 + size])[0] == masked(data)
        yield data
        rest = rest[16 + size:]


def scalars(event):
    """{tag: value} of a tf.Event, by its fields' numbers."""
    def fields(data):
        while data:
            number, kind = data[0] >> 3, data[0] & 7
            data = data[1:]
            if kind == 0:
                value = shift = 0
                while True:
                    byte, data = data[0], data[1:]
                    value |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                value, data = data[:size], data[size:]
            else:
                size = shift = 0
                while True:
                    byte, data = data[0], data[1:]
                    size |= (byte & 127) << shift
                    shift += 7
                    if byte < 128:
                        break
                value, data = data[:size], data[size:]
            yield number, value

    found = {}
    for number, summary in fields(event):
        if number == 5:
            for _, value in fields(summary):
                parts = dict(fields(value))
                found[parts[1].decode()] = struct.unpack("<f", parts[2])[0]
    return found


def test_evaluation_scalars_and_frozen_tensors(daemon, make_job):
    job = make_job()
    # In float32, so that the output shows every update.
    job.weights(lambda weights: {
        name: (bits.astype(np.uint32) << 16).view(np.float32)
        for name, bits in weights.items()})
    source = read_safetensors(job.model / "model.safetensors")
    runs = job.folder / "runs"
    job_id = daemon.submit(
        job.spec(steps=4, freeze=["model.embed_tokens.*", "model.layers.0.*"],
                 schedule={"kind": "wsd", "warmup_ratio": 0.25,
                           "decay_steps": 2, "decay": "linear"},
                 eval={"data": held_out(job), "every_steps": 2},
                 tensorboard=str(runs)), "--wait")
    records = metrics(daemon, job_id)
    order = [("eval", r["eval_step"]) if "eval_step" in r
             else ("step", r["step"]) for r in records]
    assert order == [("eval", 0), ("step", 1), ("step", 2), ("eval", 2),
                     ("step", 3), ("step", 4), ("eval", 4)]
    steps = [r for r in records if "step" in r]
    assert [r["lr"] for r in steps] == [0, 1e-3, 1e-3, 5e-4]
    assert all(r["tokens_per_second"] > 0 and r["mfu"] is None for r in steps)
    evaluations = [r for r in records if "eval_step" in r]
    assert all(r["valid_tokens"] == 3 * (job.length - 1) for r in evaluations)
    info = daemon.json("status", job_id)["job"]
    assert info["eval_loss"] == evaluations[-1]["loss"]
    assert info["best_eval_loss"] == min(r["loss"] for r in evaluations)

    trained = read_safetensors(job.folder / "output" / "model.safetensors")
    for name, before in source.items():
        frozen = name.startswith(("model.embed_tokens.", "model.layers.0."))
        assert np.array_equal(trained[name], before) == frozen, name

    (path,) = runs.iterdir()
    found = [scalars(event) for event in events(path)]
    assert found[0] == {}  # the version
    assert [f["train/loss"] for f in found if "train/loss" in f] == \
        [np.float32(r["loss"]) for r in steps]
    assert [f["eval/loss"] for f in found if "eval/loss" in f] == \
        [np.float32(r["loss"]) for r in evaluations]


def test_early_stop_completes_the_job(daemon, make_job):
    job = make_job()
    # Nothing gets lower by 100.
    job_id = daemon.submit(
        job.spec(steps=50, eval={"data": held_out(job), "every_steps": 1},
                 early_stop={"patience": 2, "min_delta": 100}), "--wait")
    shown = daemon.json("show", job_id)
    assert shown["job"]["state"] == "COMPLETED"
    assert "stopped early after step 2 of 50" in shown["job"]["reason"]
    assert shown["job"]["step"] == 2
    assert (job.folder / "output" / "model.safetensors").exists()
