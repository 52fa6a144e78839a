"""A tiny model folder, made anew for every test that asks for one."""

import json
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def make_tokenizer(bos=False, trim_offsets=False):
    """Byte level; merges make tokens that straddle words and lines."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"),
              ("\u010a", "\u010a"), ("\u0120", "t")]
    vocab = {token: i for i, token in enumerate(
        alphabet + [a + b for a, b in merges])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(processors.TemplateProcessing(
            single="<s> $A", special_tokens=[
                ("<s>", tokenizer.token_to_id("<s>"))]))
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


@pytest.fixture
def make_model(tmp_path):
    """make_model(template=..., bos=...) -> the folder's path."""

    def make(template=None, bos=False, trim_offsets=False, jinja_file=None,
             eos="<|im_end|>", vocab_size=None, **config):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        tokenizer = make_tokenizer(bos, trim_offsets)
        # A run's leftovers that must not act.
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=8)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"eos_token": eos, "bos_token": "<s>", **config}
        if template is not None:
            config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if jinja_file is not None:
            (folder / "chat_template.jinja").write_text(jinja_file)
        if vocab_size is not None:
            (folder / "config.json").write_text(
                json.dumps({"vocab_size": vocab_size}))
        return folder

    return make


@pytest.fixture
def prepare(tmp_path, capsys):
    """prepare(model, text of the input, name=..., *options) -> Result."""
    from prepare import cli

    class Result:

        def __init__(self, code, output):
            self.code = code
            captured = capsys.readouterr()
            self.out, self.err = captured.out, captured.err
            self.output = output

        def read(self, name=None):
            from safetensors import safe_open
            path = self.output if name is None else self.output.parent / name
            with safe_open(str(path), "numpy") as file:
                return ({key: file.get_tensor(key) for key in file.keys()},
                        file.metadata())

    def run(model, content, *options, name="input.jsonl"):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")
        output = tmp_path / "data.safetensors"
        code = cli.main(["--model", str(model), "--input", str(path),
                         "--output", str(output), *map(str, options)])
        return Result(code, output)

    return run


def texts_by_mask(model, tensors):
    """Per document, [(learnt?, text)] in runs of equal mask."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    documents = []
    offsets = tensors["doc_offsets"].tolist()
    for begin, end in zip(offsets, offsets[1:]):
        runs = []
        for token, learnt in zip(tensors["input_ids"][begin:end].tolist(),
                                 tensors["loss_mask"][begin:end].tolist()):
            if not runs or runs[-1][0] != learnt:
                runs.append((learnt, []))
            runs[-1][1].append(token)
        documents.append([
            (bool(learnt), tokenizer.decode(ids, skip_special_tokens=False))
            for learnt, ids in runs])
    return documents
