import sys
import pathlib

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from job_data import Sampler, StreamData  # noqa: E402
from private_daemon import write_dataset  # noqa: E402

# What worker/data/sampler.cc gives; tests/unit/worker_data/sampler_test.cc has
# the same.
ORDERS = [
    (1, 0, {0: 0, 1: 0, 2: 0}),
    (5, 0, {0: 3, 1: 0, 2: 2, 4: 4, 5: 3, 12: 1}),
    (1000, 7, {0: 773, 1: 13, 2: 206, 999: 249, 1000: 544, 2500: 417}),
    (1600, 42, {0: 1170, 1: 989, 2: 360, 1599: 616, 1600: 1500, 4000: 215}),
    (4097, 2**64 - 1, {0: 461, 1: 263, 2: 2459, 4096: 1912, 4097: 3908,
                       10242: 3348}),
    (2**62 - 3, 5, {0: 3086485930824012772, 2**62 - 3: 4435752721969563239,
                    11529215046068469752: 2303580011408167017}),
]


@pytest.mark.parametrize("sequences, seed, order", ORDERS)
def test_order_is_that_of_jobs(sequences, seed, order):
    sampler = Sampler(sequences, seed)
    assert {p: sampler.at(p) for p in order} == order


def test_labels_are_the_next_tokens_within_a_sequence(tmp_path):
    ids = np.arange(23)
    mask = np.ones(23)
    mask[[0, 6]] = 0
    write_dataset(tmp_path / "data.safetensors", ids, mask, [0, 9, 23],
                  layout="stream")
    data = StreamData(tmp_path / "data.safetensors", 5, seed=1)
    assert data.ids.shape == (4, 5)  # the tail is dropped
    x = -100
    assert data.labels.tolist() == [[1, 2, 3, 4, x], [x, 7, 8, 9, x],
                                    [11, 12, 13, 14, x], [16, 17, 18, 19, x]]


def test_every_epoch_has_each_sequence_once(tmp_path):
    write_dataset(tmp_path / "data.safetensors", np.arange(24), np.ones(24),
                  [0, 24], layout="stream")
    data = StreamData(tmp_path / "data.safetensors", 4, seed=3)
    for epoch in range(3):
        firsts = [int(i) for step in range(3)
                  for i in data.step(3 * epoch + step, 2)[0][:, 0]]
        assert sorted(firsts) == [0, 4, 8, 12, 16, 20]
