"""How many sequences a job makes of documents: what a person wants to know
before training. The job's own table is worker/data/sequence_table.h."""

import bisect
import collections

import numpy as np


def parts(lengths, length):
    """Lengths of the documents, longer ones split."""
    for n in lengths:
        while n > length:
            yield length
            n -= length
        yield n


def packed(lengths, length):
    """Sequences that best fit, longest first, makes of documents."""
    sequences = 0
    open_sequences = collections.Counter()  # by the room left in them
    rooms = []                              # its keys, ascending
    for n in sorted(parts(lengths, length), reverse=True):
        fit = bisect.bisect_left(rooms, n)
        if fit == len(rooms):
            sequences += 1
            room = length - n
        else:
            room = rooms[fit]
            open_sequences[room] -= 1
            if not open_sequences[room]:
                del rooms[fit]
            room -= n
        if room:
            if not open_sequences[room]:
                bisect.insort(rooms, room)
            open_sequences[room] += 1
    return sequences


def describe_lengths(lengths):
    """One line of the documents' lengths in tokens."""
    low, median, high, top = np.percentile(
        lengths, (0, 50, 90, 100), method="lower").astype(int)
    return (f"tokens of a document: {low} to {top}, mean"
            f" {np.mean(lengths):.1f}, median {median}, 90 % have at most"
            f" {high}")


def describe_sequences(lengths, length, layout):
    """What a job of this sequence length does with them, line by line."""
    tokens = sum(lengths)
    if layout == "stream":
        plain = tokens // length
        lines = [f"{plain} sequences of {length}, cut evenly: attention"
                 f" crosses documents, {tokens - plain * length} tokens are"
                 " left out"]
    else:
        plain = sum(1 for _ in parts(lengths, length))
        lines = [f"{plain} sequences of {length}, one document each:"
                 f" {_padding(tokens, plain, length)}"]
    count = packed(lengths, length)
    lines.append(f"{count} with packing: true, documents apart from each"
                 f" other: {_padding(tokens, count, length)}")
    return lines


def _padding(tokens, sequences, length):
    return f"{100 * (1 - tokens / (sequences * length)):.1f} % padding"
