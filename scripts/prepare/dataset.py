"""Documents -> tokens with a loss mask -> the dataset file.

The file's format is stated at the top of worker/data/dataset.h.
"""

import dataclasses
import hashlib
import itertools

import numpy as np

from . import safetensors_file
from .errors import InputError

LAYOUTS = ("stream", "documents")
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4 << 20


@dataclasses.dataclass
class TokenDocument:
    where: str
    ids: np.ndarray   # int32
    mask: np.ndarray  # uint8, 1: a label

    @property
    def labels(self):
        # The first token of a sequence has nothing before it.
        return int(self.mask[1:].sum())


def tokenize(documents, model):
    """Yields TokenDocuments; empty texts give none."""
    pieces = []
    for batch in _batches(documents):
        for flag, group in itertools.groupby(
                batch, lambda document: document.add_special_tokens):
            group = list(group)
            encodings = model.tokenizer.encode_batch(
                [document.text for document in group],
                add_special_tokens=flag)
            for document, encoding in zip(group, encodings):
                pieces.append(_tokens(document, encoding, model))
                if not document.ends:
                    continue
                where = document.where
                ids = np.concatenate([p.ids for p in pieces])
                mask = np.concatenate([p.mask for p in pieces])
                pieces = []
                if mask.any():
                    if document.append_eos:
                        ids, mask = _with_eos(ids, mask, model.eos_id)
                    _check_vocab(where, ids, model)
                    yield TokenDocument(where, ids, mask)


def _batches(documents):
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokens(document, encoding, model):
    ids = np.array(encoding.ids, np.int32)
    # What the tokenizer's post-processor adds (BOS) is given, never learnt.
    # An EOS that it adds is dropped: append_eos decides about that.
    added = np.array(encoding.special_tokens_mask, bool)
    if document.append_eos or not document.ends:
        while len(ids) and added[-1] and ids[-1] == model.eos_id:
            ids, added = ids[:-1], added[:-1]
    if document.spans is None:
        return TokenDocument(document.where, ids, (~added).astype(np.uint8))
    mask = np.zeros(len(ids), np.uint8)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:len(ids)]
    begins, ends = offsets[:, 0], offsets[:, 1]
    # A token is learnt if it holds a learnt character: one that straddles the
    # border is the first that the model has to choose itself.
    for begin, end in document.spans:
        mask[(begins < end) & (ends > begin) & (ends > begins) & ~added] = 1
    if not mask.any():
        raise InputError(document.where, "none of its tokens lies in what is"
                         " to be learnt")
    return TokenDocument(document.where, ids, mask)


def _with_eos(ids, mask, eos_id):
    if ids[-1] == eos_id:  # the text itself ends with it
        mask = mask.copy()
        mask[-1] = 1
        return ids, mask
    return (np.append(ids, np.int32(eos_id)),
            np.append(mask, np.uint8(1)))


def _check_vocab(where, ids, model):
    top = int(ids.max())
    if model.vocab_size is not None and top >= model.vocab_size:
        raise InputError(
            where, f"token {top} ('{model.token(top)}') is outside the model's"
            f" vocabulary of {model.vocab_size} (config.json, vocab_size): the"
            " tokenizer does not belong to the model")


def limit(documents, layout, max_tokens):
    """The documents up to `max_tokens`: whole ones, but a stream is cut to
    the token."""
    total = 0
    for document in documents:
        left = max_tokens - total
        if len(document.ids) > left:
            if layout == "stream" and left >= 2:
                yield TokenDocument(document.where, document.ids[:left],
                                    document.mask[:left])
            elif total == 0:
                raise InputError(
                    document.where, f"the first document has"
                    f" {len(document.ids)} tokens, --max-tokens is"
                    f" {max_tokens}")
            return
        total += len(document.ids)
        yield document


def split(documents, layout, fraction, seed):
    """(train, eval). By content, so that copies of a document are all on one
    side, and neither side depends on the order of the input. A stream of a
    single document gives its tail."""
    keys = [hashlib.sha256(f"{seed}:".encode() + d.ids.tobytes()).digest()
            for d in documents]
    distinct = sorted(set(keys))
    if len(distinct) < 2:
        if layout == "stream" and len(documents) == 1:
            return _split_tail(documents[0], fraction)
        raise InputError(
            "--eval-fraction", f"{fraction} of {len(documents)} documents,"
            f" {len(distinct)} of them distinct, leaves one side empty")
    count = min(max(1, round(fraction * len(distinct))), len(distinct) - 1)
    held_out = set(distinct[:count])
    sides = [], []
    for document, key in zip(documents, keys):
        sides[key in held_out].append(document)
    return sides


def _split_tail(document, fraction):
    count = len(document.ids)
    cut = count - round(fraction * count)
    if not 2 <= cut <= count - 2:
        raise InputError("--eval-fraction", f"{fraction} of {count} tokens"
                         " leaves one side empty")
    return tuple([TokenDocument(document.where, document.ids[part],
                                document.mask[part])]
                 for part in (slice(0, cut), slice(cut, None)))


def write(path, documents, layout, metadata):
    ids = np.concatenate([d.ids for d in documents])
    mask = np.concatenate([d.mask for d in documents])
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(d.ids) for d in documents], out=offsets[1:])
    safetensors_file.write(
        path,
        {"doc_offsets": offsets, "input_ids": ids, "loss_mask": mask},
        {"format": "slidedp-dataset", "version": "1", "layout": layout,
         **metadata})
