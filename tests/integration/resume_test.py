"""Jobs that go on: with everything a job can have, after a host's failure, and
from what they must not."""

import shutil
import sqlite3
import subprocess

import numpy as np
import pytest
from checkpoint_test import (checkpoints, ended, events, hidden_in, kill,
                             metrics, spec_of, state_of, steps_in, weights_of,
                             workers)
from conftest import wait_for, write_dataset
from training_test import held_out


def documents(job):
    """Two sets of documents of 2 to 24 tokens; their weighted list."""
    rng = np.random.default_rng(3)
    sources = []
    for i, weight in enumerate((0.75, 0.25)):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(2, 25, 40))])
        path = job.folder / f"documents{i}.safetensors"
        write_dataset(path, rng.integers(0, 256, offsets[-1]),
                      rng.integers(0, 2, offsets[-1]), offsets, "documents")
        sources.append({"path": str(path), "weight": weight})
    return sources


def told(daemon, job_id, after):
    """What training decided at each record beyond a step."""
    keys = ("step", "loss", "grad_norm", "lr", "eval_step", "best")
    return [{key: record[key] for key in keys if key in record}
            for record in metrics(daemon, job_id)
            if record.get("step", record.get("eval_step", 0) + 0.5) > after]


def test_everything_at_once_goes_on(daemon, make_job, tmp_path):
    """Packing, a mixture, evaluations, early stop, frozen tensors, a schedule
    and clipping: by hand on as many ranks to the bit, on others within the
    order of additions."""
    job = make_job("qwen3_untied")
    # Evaluations 1 to 10 are not lower by 100 than the first: 4 of them are
    # before the checkpoint that the job goes on from.
    common = dict(
        data=documents(job), packing=True, deterministic=True,
        ranks=max(job.ranks(1, 2)), compute_dtype="fp32", batch_size=8,
        steps=40, freeze=["model.embed_tokens.*"],
        schedule={"kind": "cosine", "warmup_steps": 3}, max_grad_norm=0.5,
        eval={"data": held_out(job), "every_steps": 1},
        early_stop={"patience": 10, "min_delta": 100})
    whole = daemon.submit(spec_of(job, "whole", **common), "--wait")
    shown = daemon.json("status", whole)["job"]
    assert "stopped early after step 10 of 40" in shown["reason"], shown
    start = checkpoints(job, "whole") / "step-00000005"
    after = told(daemon, whole, 5)

    def exported(folder, name):
        daemon.call("export", folder, "-o", tmp_path / name, "--dtype",
                    "float32")
        return weights_of(tmp_path / name)

    before = exported(start, "before")
    last = exported(checkpoints(job, "whole") / "step-00000010", "last")
    way = sum(np.square(last[n].astype(float) - before[n]).sum() for n in last)
    assert way > 0 and np.array_equal(last["model.embed_tokens.weight"],
                                      before["model.embed_tokens.weight"])
    for ranks in job.ranks(1, 2, 4):
        name = f"ranks{ranks}"
        job_id = daemon.submit(
            spec_of(job, name, **{**common, "ranks": ranks}),
            "--resume", start, "--wait")
        again = daemon.json("status", job_id)["job"]
        assert again["first_step"] == 5
        assert again["best_eval_step"] == shown["best_eval_step"]
        assert again["reason"].split(";")[0] == shown["reason"].split(";")[0]
        made = checkpoints(job, name) / "step-00000010"
        if ranks == common["ranks"]:
            assert again["reason"] == shown["reason"]
            assert told(daemon, job_id, 5) == after
            assert state_of(made) == state_of(
                checkpoints(job, "whole") / "step-00000010")
            continue
        records = told(daemon, job_id, 5)
        assert [r.get("eval_step", r.get("step")) for r in records] == \
            [r.get("eval_step", r.get("step")) for r in after]
        assert [r["loss"] for r in records] == pytest.approx(
            [r["loss"] for r in after], rel=1e-4)
        other = exported(made, name)
        apart = sum(np.square(last[n].astype(float) - other[n]).sum()
                    for n in last)
        assert apart <= 1e-4 * way, (ranks, apart / way)


def test_a_hosts_failure_costs_a_retry(daemon, make_job):
    """All processes die in the middle of a checkpoint; a run folder of before
    is there, and a process number of then is somebody else's now."""
    job = make_job("qwen3_untied")
    steps = 200
    common = dict(steps=steps, deterministic=True, max_grad_norm=0.5,
                  checkpoint={"every_steps": 20, "keep": 2})
    daemon.submit(spec_of(job, "whole", **common), "--wait")
    job_id = daemon.submit(spec_of(job, "failed", retries=1, **common))
    folder = checkpoints(job, "failed")
    wait_for("a checkpoint", lambda: folder.exists() and steps_in(folder))
    log = daemon.json("show", job_id)["log_folder"] + "/metrics.jsonl"
    daemon.kill()
    kill(workers(daemon))
    wait_for("no worker left", lambda: not workers(daemon))
    assert daemon.socket.exists()

    half = folder / f".step-00000199.tmp-job-{job_id}"
    half.mkdir(exist_ok=True)
    (half / "manifest.json").write_text("{")
    with open(log, "ab") as file:
        file.write(b'{"step":199,"lo' + b"\0" * 100)
    stranger = subprocess.Popen(["sleep", "1000"])
    try:
        # As the kernel counts, for the process that has the number now.
        with open(f"/proc/{stranger.pid}/stat") as file:
            ticks = int(file.read().rsplit(")", 1)[1].split()[19])
        journal = sqlite3.connect(
            next((daemon.scratch / "state").rglob("jobs.sqlite")))
        with journal:
            journal.execute("DELETE FROM worker")
            journal.execute(
                "INSERT INTO worker VALUES (?, 0, ?, ?, 'the boot before')",
                (job_id, stranger.pid, ticks))
        journal.close()
        daemon.start()
        after = ended(daemon, job_id)
        assert stranger.poll() is None, "a stranger was killed"
    finally:
        stranger.kill()
        stranger.wait()
    assert after["state"] == "COMPLETED", after
    assert after["retries_used"] == 1 and after["first_step"] >= 20
    assert any("slidedpd was killed" in text for text in events(daemon, job_id))
    last = f"step-{steps:08}"
    assert state_of(folder / last) == \
        state_of(checkpoints(job, "whole") / last)
    assert not hidden_in(folder)
    assert [record["step"] for record in metrics(daemon, job_id)] == \
        list(range(1, steps + 1))


def test_without_retries_a_failure_is_the_end_and_the_user_goes_on(
        daemon, make_job):
    job = make_job()
    spec = spec_of(job, "output", steps=1000000, retries=0)
    job_id = daemon.submit(spec)
    folder = checkpoints(job, "output")
    wait_for("a checkpoint", lambda: folder.exists() and steps_in(folder))
    daemon.kill()
    wait_for("no worker left", lambda: not workers(daemon))
    daemon.start()
    failed = daemon.job(job_id)
    assert failed["state"] == "FAILED" and "killed" in failed["reason"], failed
    saved = steps_in(folder)[-1]
    job_id = daemon.submit({**spec, "steps": saved + 5}, "--resume", "auto",
                           "--wait")
    after = daemon.job(job_id)
    assert after["state"] == "COMPLETED" and after["first_step"] == saved, after


@pytest.fixture
def trained(daemon, make_job):
    job = make_job(sequences=16)
    daemon.submit(spec_of(job, "first", steps=5), "--wait")
    return job, checkpoints(job, "first") / "step-00000005"


def refused(daemon, job, path, **changes):
    """The one line that says why a job can't go on from there."""
    result = daemon.submit(spec_of(job, "other", **{"steps": 10, **changes}),
                           "--resume", path, check=False)
    assert not isinstance(result, int), "the job was taken"
    assert result.returncode == 1
    message = result.stderr.strip()
    assert len(message.splitlines()) == 1, message
    return message


def test_what_a_job_cannot_go_on_from_is_one_error(daemon, trained, make_job,
                                                   tmp_path):
    job, saved = trained
    other = make_job(sequences=16)  # as many tokens, one of them another
    other.ids[100] ^= 1
    other.write_data()
    jobs = len(daemon.json("status", "-a")["jobs"])
    manifest = str(saved / "manifest.json")
    for change, parts in (
            ({"seed": 43}, ("seed was 42, is 43", manifest)),
            ({"batch_size": 8}, ("batch_size was 4, is 8", manifest)),
            ({"sequence_length": 12}, ("was 24, is 12", manifest)),
            ({"packing": True}, ("packing was false, is true", manifest)),
            ({"steps": 4}, ("has only 4 steps", manifest)),
            ({"data": make_job(sequences=12).data}, ("was 16, is 12",)),
            ({"data": other.data}, ("sources was 16 sequences", manifest)),
            ({"model": make_job("qwen3_untied").model},
             ("layout_hash", "resume with the model", manifest))):
        change = {key: str(value) if key in ("data", "model") else value
                  for key, value in change.items()}
        message = refused(daemon, job, saved, **change)
        assert all(part in message for part in parts), message

    text = (saved / "manifest.json").read_text()
    bad = tmp_path / "bad"
    shutil.copytree(saved, bad)

    def with_manifest(content):
        (bad / "manifest.json").write_text(content)
        message = refused(daemon, job, bad)
        assert str(bad / "manifest.json") in message, message
        return message

    message = with_manifest(text.replace('"version":1', '"version":2'))
    assert "version" in message and "use the release that wrote it" in message
    assert "checksum" in with_manifest(text.replace('"step":5', '"step":6'))
    with_manifest(text[:len(text) // 2])
    with_manifest("")
    (bad / "manifest.json").unlink()
    assert "holds no manifest.json" in refused(daemon, job, bad)
    assert "no-such" in refused(daemon, job, tmp_path / "no-such")
    assert str(job.data) in refused(daemon, job, job.data)
    (bad / "manifest.json").write_text(text)
    (bad / "state-00000.safetensors").unlink()
    assert "state-00000.safetensors" in refused(daemon, job, bad)
    (bad / "state-00000.safetensors").symlink_to("/dev/zero")
    assert "state-00000.safetensors" in refused(daemon, job, bad)
    assert len(daemon.json("status", "-a")["jobs"]) == jobs


def test_export_and_verify_refuse_the_same(daemon, trained, tmp_path):
    job, saved = trained
    bad = tmp_path / "bad"
    shutil.copytree(saved, bad)
    (bad / "state-00001.safetensors").unlink()
    for path, part in ((bad, "state-00001.safetensors"),
                       (job.data, str(job.data)),
                       (tmp_path / "no-such", "no-such"),
                       (job.model, "holds no manifest.json")):
        for arguments in (("verify", path),
                          ("export", path, "-o", tmp_path / "out")):
            result = daemon.call(*arguments, check=False)
            assert result.returncode == 1, arguments
            assert part in result.stdout + result.stderr, result
            assert "Traceback" not in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()
                  if p.name.startswith((".out", "out"))) == []
    # A target that is there is left alone.
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    result = daemon.call("export", saved, "-o", tmp_path / "out", check=False)
    assert result.returncode == 1 and "not empty" in result.stderr
    assert (tmp_path / "out/mine").read_text() == "mine"
