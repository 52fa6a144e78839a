#!/usr/bin/env python3
"""Reads an event file with TensorBoard's own reader: prints step, tag, value.

    pip install tensorboard
    python3 tests/references/read_events.py FOLDER
"""

import sys

from tensorboard.backend.event_processing.event_accumulator import \
    EventAccumulator


def main():
    accumulator = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    if not tags:
        sys.exit(f"{sys.argv[1]}: no scalars")
    for tag in tags:
        for event in accumulator.Scalars(tag):
            print(event.step, tag, event.value)


if __name__ == "__main__":
    main()
