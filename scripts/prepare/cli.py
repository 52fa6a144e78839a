"""The command line of slidedp-prepare."""

import argparse
import datetime
import os
import sys

from . import dataset, formats, samples, sequences
from .errors import InputError
from .model_folder import ModelFolder


def main(arguments=None):
    options = _parse(arguments)
    try:
        _run(options)
    except InputError as error:
        print(f"slidedp-prepare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="slidedp-prepare", allow_abbrev=False,
        description="Makes a SlideDP token dataset from text, chats or"
        " instructions, with the tokenizer and chat template of a model.")
    parser.add_argument("--model", required=True, metavar="DIR",
                        help="Hugging Face model folder")
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE",
                        help="text, JSON or JSON Lines files")
    parser.add_argument("--output", required=True, metavar="FILE",
                        help="the dataset, .safetensors")
    parser.add_argument("--format", default="auto",
                        choices=("auto", *formats.FORMATS),
                        help="auto: by name and first record, each file")
    parser.add_argument("--layout", choices=dataset.LAYOUTS,
                        help="what a job without packing does. stream: documents"
                        " joined and cut evenly (default for text, jsonl);"
                        " documents: one a sequence (default for chat,"
                        " alpaca)")
    parser.add_argument("--eval-fraction", type=_fraction, metavar="F",
                        help="hold back this part, 0 < F < 1")
    parser.add_argument("--eval-output", metavar="FILE",
                        help="where the part held back goes")
    parser.add_argument("--max-tokens", type=_positive, metavar="N",
                        help="stop after N tokens")
    parser.add_argument("--sequence-length", type=_positive, metavar="N",
                        help="report what a job of this length makes of it,"
                        " packed and not")
    parser.add_argument("--seed", type=int, default=0,
                        help="of the choice what is held back (default 0)")
    parser.add_argument("--date", type=datetime.datetime.fromisoformat,
                        metavar="YYYY-MM-DD",
                        help="what chat templates take for today")
    parser.add_argument("--quiet", action="store_true",
                        help="no samples and counts")
    options = parser.parse_args(arguments)
    if (options.eval_fraction is None) != (options.eval_output is None):
        parser.error("--eval-fraction and --eval-output belong together")
    if options.eval_output is not None and (
            os.path.realpath(options.eval_output)
            == os.path.realpath(options.output)):
        parser.error("--output and --eval-output are the same file")
    return options


def _run(options):
    model = ModelFolder(options.model, options.date)
    kinds = [formats.detect_format(path) if options.format == "auto"
             else options.format for path in options.input]
    layout = options.layout or _default_layout(kinds)

    read = 0

    def texts():
        nonlocal read
        for path, kind in zip(options.input, kinds):
            for document in formats.read_documents(path, kind, model):
                read += document.ends
                yield document

    tokens = dataset.tokenize(texts(), model)
    if options.max_tokens is not None:
        tokens = dataset.limit(tokens, layout, options.max_tokens)
    documents = list(tokens)
    if not documents:
        raise InputError(", ".join(options.input), "no text at all: every"
                         f" one of {read} documents is empty")

    parts = [("", options.output, documents)]
    if options.eval_fraction is not None:
        train, held_out = dataset.split(documents, layout,
                                        options.eval_fraction, options.seed)
        parts = [("train: ", options.output, train),
                 ("eval: ", options.eval_output, held_out)]
    if not options.quiet:
        _show_samples(parts[0][2], model)
    for label, path, part in parts:
        if not any(document.labels for document in part):
            raise InputError(path, f"{label}no token to learn in"
                             f" {len(part)} documents")
        dataset.write(path, part, layout, _metadata(options, kinds, model,
                                                    part))
        if not options.quiet:
            for line in _counts(part, options.sequence_length, layout):
                print(label + line)
            print(f"{label}wrote {path}")
    empty = 0 if options.max_tokens is not None else read - len(documents)
    if empty and not options.quiet:
        print(f"left out {empty} empty documents")


def _default_layout(kinds):
    layouts = {"documents" if kind in ("chat", "alpaca") else "stream"
               for kind in kinds}
    if len(layouts) > 1:
        raise InputError("--input", "mixes formats with different layouts"
                         f" ({', '.join(sorted(set(kinds)))}); say --layout")
    return layouts.pop()


def _metadata(options, kinds, model, documents):
    return {
        "tokenizer_sha256": model.tokenizer_sha256,
        "source_format": ",".join(sorted(set(kinds))),
        "documents": str(len(documents)),
        "tokens": str(sum(len(d.ids) for d in documents)),
        "label_tokens": str(sum(d.labels for d in documents)),
        "seed": str(options.seed),
    }


def _show_samples(documents, model):
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    how = "green" if colours else "between [[ and ]]"
    for document in samples.choose(documents):
        print(f"--- {document.where} (learnt: {how})")
        print(samples.sample(document, model.tokenizer, colours))
    print("---")


def _counts(documents, sequence_length, layout):
    tokens = sum(len(d.ids) for d in documents)
    labels = sum(d.labels for d in documents)
    lengths = [len(d.ids) for d in documents]
    lines = [f"{len(documents)} documents, {tokens} tokens, {labels} labels",
             sequences.describe_lengths(lengths)]
    if sequence_length is None:
        return lines
    lines += sequences.describe_sequences(lengths, sequence_length, layout)
    longer = sum(n > sequence_length for n in lengths)
    if longer:
        bare = sum(not d.mask[1:sequence_length].any() for d in documents)
        lines.append(
            f"{longer} documents longer than {sequence_length} are split"
            " there, or cut with long_documents: truncate"
            + (f" ({bare} of all have no label before the cut)" if bare
               else ""))
    return lines


def _positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"wants at least 1, has {text}")
    return value


def _fraction(text):
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"wants 0 < F < 1, has {text}")
    return value
