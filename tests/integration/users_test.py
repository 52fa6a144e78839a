"""Two users on one daemon: what belongs to one is closed to the other."""

import json
import os
import pathlib
import pwd
import shutil
import socket
import tempfile

import pytest
from conftest import Daemon, Job, memfds, processes_with, wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0,
                                reason="needs root to be two users")

# Accounts that every Debian has; the daemon refuses uids without one.
ALICE, BOB = pwd.getpwnam("games").pw_uid, pwd.getpwnam("news").pw_uid


@pytest.fixture
def open_folder():
    """A folder that every user can reach."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="slidedp-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shared(binaries, open_folder):
    (open_folder / "bin").mkdir()
    for name in ("slidedpd", "slidedp-worker", "slidedpctl"):
        shutil.copy(binaries / name, open_folder / "bin" / name)
    (open_folder / "daemon").mkdir()
    daemon = Daemon(open_folder / "bin", open_folder / "daemon")
    yield daemon
    daemon.stop()


def job_of(uid, folder, **changes):
    home = folder / f"home{uid}"
    home.mkdir()
    job = Job(home)
    file = home / "job.yaml"
    file.write_text(json.dumps(job.spec(**changes)))
    for path in [home, *home.rglob("*")]:
        os.chown(path, uid, uid)
    home.chmod(0o700)
    return job, file


def as_user(daemon, uid, *arguments, check=True):
    return daemon.call(*arguments, check=check, user=uid, group=uid,
                       extra_groups=[], cwd="/")


def test_workers_run_as_the_submitting_user(shared, open_folder):
    job, file = job_of(ALICE, open_folder, steps=400)
    result = as_user(shared, ALICE, "submit", file)
    job_id = json.loads(result.stdout)["id"]
    wait_for("a step", lambda: shared.job(job_id)["step"] > 0)
    found = processes_with(f"--socket\0{shared.socket}")
    assert found
    for pid in found:
        try:
            status = pathlib.Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ids = [line.split()[1:] for line in status.splitlines()
               if line.startswith(("Uid:", "Gid:"))]
        assert ids[0] == [str(ALICE)] * 4 and "0" not in ids[1]
    wait_for("completed", lambda: shared.job(job_id)["state"] == "COMPLETED",
             120)
    for path in (job.folder / "output").iterdir():
        assert path.stat().st_uid == ALICE


def test_others_see_a_redacted_queue_and_can_do_nothing(shared, open_folder):
    _, file = job_of(ALICE, open_folder, steps=100000)
    job_id = json.loads(as_user(shared, ALICE, "submit", file).stdout)["id"]
    wait_for("a step", lambda: shared.job(job_id)["step"] > 0)
    seen = json.loads(as_user(shared, BOB, "status").stdout)["jobs"]
    assert [j["id"] for j in seen] == [job_id] and seen[0]["name"] != "tiny"
    for verb in (("show", job_id), ("logs", job_id), ("cancel", job_id),
                 ("drain", "--reason", "mine"), ("undrain",)):
        result = as_user(shared, BOB, *verb, check=False)
        assert result.returncode == 4, (verb, result)
    assert shared.job(job_id)["state"] == "RUNNING"
    as_user(shared, ALICE, "cancel", job_id)
    wait_for("cancelled", lambda: shared.job(job_id)["state"] == "CANCELLED")


def test_a_forged_nonce_gets_no_segments(shared, open_folder):
    _, file = job_of(ALICE, open_folder, steps=100000)
    job_id = json.loads(as_user(shared, ALICE, "submit", file).stdout)["id"]
    wait_for("a step", lambda: shared.job(job_id)["step"] > 0)
    # AttachRequest{job, rank = 1, nonce}
    message = (b"\x08" + bytes([job_id]) + b"\x10\x01\x1a\x10" +
               os.urandom(16))
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attach:
            attach.settimeout(10)
            attach.connect(str(shared.socket.parent / "attach.sock"))
            attach.send(message)
            data, fds, _, _ = socket.recv_fds(attach, 4096, 16)
            assert fds == [] and (data == b"" or data[0] == 0x0a), data
    assert shared.job(job_id)["state"] == "RUNNING"
    shared.call("cancel", job_id)
    wait_for("segments gone", lambda: memfds(shared.process.pid) == 0)


def test_a_users_private_files_stay_private(shared, open_folder):
    """The daemon is root, but opens nothing by a user's path."""
    job, file = job_of(ALICE, open_folder)
    spec = json.loads(file.read_text())
    home = open_folder / "bob"
    home.mkdir()
    os.chown(home, BOB, BOB)
    spec["output"] = str(home / "output")
    stolen = home / "job.yaml"
    stolen.write_text(json.dumps(spec))
    os.chown(stolen, BOB, BOB)
    result = as_user(shared, BOB, "submit", stolen, check=False)
    assert result.returncode == 1 and "ermission" in result.stderr
    assert shared.json("status", "-a")["jobs"] == []


def test_anothers_checkpoint_is_nobodys(shared, open_folder):
    job, file = job_of(ALICE, open_folder, steps=4,
                       checkpoint={"every_steps": 2})
    job_id = json.loads(as_user(shared, ALICE, "submit", file, "--wait")
                        .stdout.splitlines()[0])["id"]
    saved = job.folder / "output.checkpoints/step-00000004"
    assert saved.exists()
    bobs, file = job_of(BOB, open_folder, steps=8)
    for arguments in (("submit", file, "--resume", saved), ("verify", saved),
                      ("export", saved, "-o", bobs.folder / "out")):
        result = as_user(shared, BOB, *arguments, check=False)
        assert result.returncode == 1, (arguments, result)
        said = result.stdout + result.stderr
        assert str(saved) in said and "Permission denied" in said, said
    result = as_user(shared, BOB, "export", job_id, "-o", bobs.folder / "out",
                     check=False)
    assert result.returncode == 4, result
