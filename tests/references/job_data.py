"""What a job reads in which step, without the job: worker/data/sampler.cc and
the stream layout of worker/data/dataset.h once more, for reference trainers."""

import lzma
import pathlib
import sys

import numpy as np

sys.path.insert(
    0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
from private_daemon import read_safetensors  # noqa: E402

MASK64 = (1 << 64) - 1
GOLDEN_RATIO = 0x9e3779b97f4a7c15
ROUNDS = 6


def _mix(x):
    x = ((x ^ (x >> 30)) * 0xbf58476d1ce4e5b9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94d049bb133111eb) & MASK64
    return x ^ (x >> 31)


def _feistel(x, key, half_bits):
    mask = (1 << half_bits) - 1
    left, right = x >> half_bits, x & mask
    for round_number in range(1, ROUNDS + 1):
        round_key = _mix((key + round_number * GOLDEN_RATIO) & MASK64)
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return left << half_bits | right


class Sampler:
    """at(p): the sequence at position p."""

    def __init__(self, sequences, seed):
        self.sequences = sequences
        self.seed = seed
        self.half_bits = 1
        while 1 << (2 * self.half_bits) < sequences:
            self.half_bits += 1

    def at(self, position):
        epoch, x = divmod(position, self.sequences)
        key = _mix((_mix((self.seed + GOLDEN_RATIO) & MASK64) + epoch) & MASK64)
        while True:
            x = _feistel(x, key, self.half_bits)
            if x < self.sequences:
                return x


class StreamData:
    """A dataset of layout "stream" as a job of `sequence_length` reads it."""

    def __init__(self, path, sequence_length, seed):
        tensors = read_safetensors(path)
        ids, mask = tensors["input_ids"], tensors["loss_mask"]
        count = len(ids) // sequence_length
        shape = (count, sequence_length)
        self.ids = ids[:count * sequence_length].reshape(shape)
        mask = mask[:count * sequence_length].reshape(shape)
        # A label is the next token of the same sequence, where the mask has it.
        self.labels = np.full(shape, -100, np.int32)
        self.labels[:, :-1] = np.where(mask[:, 1:] == 1, self.ids[:, 1:], -100)
        self.sampler = Sampler(count, seed)

    def step(self, step, batch_size):
        """ids, labels [batch_size, sequence_length]; a label of -100: none."""
        chosen = [self.sampler.at(step * batch_size + place)
                  for place in range(batch_size)]
        return self.ids[chosen], self.labels[chosen]


def unpack(compressed, target):
    """A dataset that travelled as FILE.xz."""
    with lzma.open(compressed) as source, open(target, "wb") as file:
        while block := source.read(1 << 20):
            file.write(block)
