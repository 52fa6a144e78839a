"""Safetensors files: written complete or not at all, read with checks.

Numpy has no bfloat16, so a BF16 tensor is a uint16 array of its bits.
"""

import json
import os
import struct
import tempfile

import numpy as np

from .errors import InputError

_DTYPES = {
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20


def write(path, tensors, metadata):
    """`tensors`: name -> array, in the file's order; widest types first keeps
    every tensor aligned. `metadata`: str -> str."""
    header = {"__metadata__": dict(metadata)}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def body(file):
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).data)

    write_atomically(path, body)


def write_atomically(path, body):
    """Calls body(file) on a temporary file, then fsync, rename, fsync of the
    folder: `path` is the old file or the new one, never a part."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        descriptor, temporary = tempfile.mkstemp(
            dir=folder, prefix=f".{os.path.basename(path)}.")
    except OSError as error:
        raise InputError(path, f"cannot write here: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            body(file)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(path, f"cannot write: {error.strerror}") from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


def read(path):
    """(tensors, metadata) of a small file, wholly in memory."""
    with open(path, "rb") as file:
        data = file.read()
    if len(data) < 8:
        raise InputError(path, "too short to be a safetensors file")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise InputError(path, f"header of {length} bytes is longer than the"
                         " file or the limit")
    try:
        header = json.loads(data[8:8 + length])
    except ValueError as error:
        raise InputError(path, f"header is not JSON: {error}") from None
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        count = int(np.prod(entry["shape"], dtype=np.int64))
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise InputError(path, f"dtype {entry['dtype']} is not read here",
                             field=name)
        if (end - begin != count * dtype.itemsize
                or not 0 <= begin <= end <= len(data) - 8 - length):
            raise InputError(path, "offsets do not match shape and file",
                             field=name)
        tensors[name] = np.frombuffer(
            data, dtype, count, 8 + length + begin).reshape(entry["shape"])
    return tensors, metadata


def _umask():
    value = os.umask(0o077)
    os.umask(value)
    return value
