"""Text, JSON Lines and Alpaca: tokens, ends of documents, layout, split."""

import json
import random

import numpy as np
import pytest
import tokenizers

from conftest import CHATML, texts_by_mask


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def texts(*values):
    return lines(*({"text": value} for value in values))


def test_stream_has_eos_between_documents_and_learns_all(make_model, prepare):
    model = make_model(eos="<|end|>")
    result = prepare(model, texts("hello", "to all"))
    assert result.code == 0, result.err
    tensors, metadata = result.read()
    assert texts_by_mask(model, tensors) == [[(True, "hello<|end|>")],
                                             [(True, "to all<|end|>")]]
    assert metadata["format"] == "slidedp-dataset"
    assert metadata["version"] == "1"
    assert metadata["layout"] == "stream"


def test_file_is_what_the_worker_reads(make_model, prepare):
    tensors, metadata = prepare(make_model(), texts("hello", "x")).read()
    assert {name: value.dtype for name, value in tensors.items()} == {
        "input_ids": np.int32, "loss_mask": np.uint8,
        "doc_offsets": np.int64}
    offsets = tensors["doc_offsets"]
    assert offsets[0] == 0 and offsets[-1] == len(tensors["input_ids"])
    assert (np.diff(offsets) > 0).all()
    assert len(tensors["loss_mask"]) == len(tensors["input_ids"])
    assert len(metadata["tokenizer_sha256"]) == 64
    assert metadata["label_tokens"] == "2"  # not the first of each document


def test_text_that_ends_with_eos_gets_no_second(make_model, prepare):
    model = make_model(eos="<|end|>")
    tensors, _ = prepare(model, texts("hello<|end|>")).read()
    assert texts_by_mask(model, tensors) == [[(True, "hello<|end|>")]]


def test_bos_of_the_tokenizer_is_kept_and_not_learnt(make_model, prepare):
    model = make_model(bos=True, eos="<|end|>")
    tensors, _ = prepare(model, texts("hello")).read()
    assert texts_by_mask(model, tensors) == [[(False, "<s>"),
                                              (True, "hello<|end|>")]]


def test_text_file_is_one_document(make_model, prepare):
    model = make_model(eos="<|end|>")
    content = "\ufeffhello\u2028\r\n\nall\n"
    tensors, _ = prepare(model, content.encode(), name="book.txt").read()
    assert texts_by_mask(model, tensors) == [[(True, content[1:] + "<|end|>")]]


@pytest.mark.parametrize("bos", [False, True])
def test_large_text_gives_the_tokens_of_the_whole(make_model, prepare,
                                                  monkeypatch, bos):
    from prepare import formats
    monkeypatch.setattr(formats, "_PIECE_BYTES", 50)
    pick = random.Random(5)
    content = "".join(pick.choice(["hello", " t", "\n", "\n\n", "  ", "\u6d77"])
                      for _ in range(2000))
    model = make_model(bos=bos, eos="<|end|>")
    tensors, _ = prepare(model, content, name="book.txt").read()
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    whole = tokenizer.encode(content).ids
    assert tensors["input_ids"].tolist() == (
        whole + [tokenizer.token_to_id("<|end|>")])
    assert tensors["doc_offsets"].tolist() == [0, len(whole) + 1]


def test_empty_documents_are_left_out_and_counted(make_model, prepare):
    model = make_model()
    result = prepare(model, texts("hello", "", "x"))
    assert len(texts_by_mask(model, result.read()[0])) == 2
    assert "left out 1 empty" in result.out


@pytest.mark.parametrize("array", [False, True])
def test_alpaca_uses_its_prompt_without_a_template(make_model, prepare, array):
    records = [{"instruction": "Add {input}.", "input": "1 {instruction}",
                "output": "hello {x}"},
               {"instruction": "Name one.", "input": "", "output": "Sun"}]
    content = json.dumps(records, indent=1) if array else lines(*records)
    model = make_model(eos="<|end|>", bos=True)
    result = prepare(model, content, name="a.json" if array else "a.jsonl")
    assert result.code == 0, result.err
    first, second = texts_by_mask(model, result.read()[0])
    assert first == [
        (False, "<s>Below is an instruction that describes a task, paired with"
         " an input that provides further context. Write a response that"
         " appropriately completes the request.\n\n### Instruction:\n"
         "Add {input}.\n\n### Input:\n1 {instruction}\n\n### Response:\n"),
        (True, "hello {x}<|end|>")]
    assert second == [
        (False, "<s>Below is an instruction that describes a task. Write a"
         " response that appropriately completes the request.\n\n"
         "### Instruction:\nName one.\n\n### Response:\n"),
        (True, "Sun<|end|>")]


def test_alpaca_goes_through_the_models_template(make_model, prepare):
    model = make_model(CHATML)
    tensors, _ = prepare(model, lines({
        "instruction": "Add.", "input": "1 2", "output": "3"})).read()
    assert texts_by_mask(model, tensors) == [[
        (False, "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n"
         "<|im_start|>assistant\n"),
        (True, "3<|im_end|>"), (False, "\n")]]


def documents(result, name=None):
    tensors, _ = result.read(name)
    offsets = tensors["doc_offsets"].tolist()
    ids = tensors["input_ids"].tolist()
    return [tuple(ids[a:b]) for a, b in zip(offsets, offsets[1:])]


def test_split_parts_the_documents_and_keeps_their_order(make_model, prepare,
                                                         tmp_path):
    model = make_model()
    # Odd ones twice: copies must not be on both sides.
    content = texts(*(f"text {i // 2 * 2 if i % 4 == 3 else i}"
                      for i in range(41)))
    everything = documents(prepare(model, content))

    def parts(seed):
        result = prepare(model, content, "--eval-fraction", "0.25",
                         "--eval-output", tmp_path / "eval.safetensors",
                         "--seed", seed)
        assert result.code == 0, result.err
        return documents(result), documents(result, "eval.safetensors")

    train, held_out = parts(1)
    assert (train, held_out) == parts(1)
    assert held_out != parts(2)[1]
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(everything)
    assert [d for d in everything if d in set(train)] == train
    distinct = len(set(everything))
    assert len(set(held_out)) == round(0.25 * distinct)


def test_split_of_one_text_gives_its_tail(make_model, prepare, tmp_path):
    model = make_model()
    result = prepare(model, "abcdefgh" * 10, "--eval-fraction", "0.1",
                     "--eval-output", tmp_path / "e.safetensors",
                     name="a.txt")
    (train,), (held_out,) = documents(result), documents(result,
                                                         "e.safetensors")
    assert (len(train), len(held_out)) == (73, 8)


def test_split_that_leaves_a_side_empty_is_refused(make_model, prepare,
                                                   tmp_path):
    result = prepare(make_model(), texts("same", "same"), "--eval-fraction",
                     "0.5", "--eval-output", tmp_path / "e.safetensors")
    assert result.code == 1
    assert "one side empty" in result.err
    assert not result.output.exists()


def test_max_tokens_cuts_a_stream_to_the_token(make_model, prepare):
    result = prepare(make_model(), texts("abcd", "efgh", "ijkl"),
                     "--max-tokens", "7")
    assert [len(d) for d in documents(result)] == [5, 2]


def test_max_tokens_takes_whole_documents(make_model, prepare):
    options = ("--layout", "documents", "--max-tokens")
    content = texts("abcd", "efgh", "ijkl")
    assert [len(d) for d in documents(
        prepare(make_model(), content, *options, "11"))] == [5, 5]
    result = prepare(make_model(), content, *options, "4")
    assert result.code == 1 and "input.jsonl:1" in result.err


def test_report_counts_what_a_job_would_cut(make_model, prepare):
    model = make_model(CHATML)
    content = lines(*({"messages": [
        {"role": "user", "content": "u" * count},
        {"role": "assistant", "content": "yes"}]} for count in (1, 60)))
    result = prepare(model, content, "--sequence-length", "32")
    assert "1 documents longer than 32" in result.out
    assert "1 of all have no label" in result.out


def test_report_says_what_packing_makes_of_the_documents(make_model, prepare):
    # 3, 5, 5 and 2 tokens with their ends: {5}, {5}, {3, 2} of 5 positions.
    content = texts("ab", "abcd", "bcde", "x")
    for layout, plain in (("documents", "4 sequences of 5, one document each:"
                           " 25.0 % padding"),
                          ("stream", "3 sequences of 5, cut evenly")):
        result = prepare(make_model(), content, "--sequence-length", "5",
                         "--layout", layout)
        assert plain in result.out
        assert "3 with packing: true" in result.out
        assert "0.0 % padding" in result.out
        assert "2 to 5, mean 3.8, median 3" in result.out


@pytest.mark.parametrize("seed", range(3))
def test_packing_is_near_the_fewest_sequences(seed):
    from prepare import sequences
    lengths = [random.Random(seed * 1000 + i).randint(1, 250)
               for i in range(400)]
    count = sequences.packed(lengths, 100)
    fewest = -(-sum(lengths) // 100)
    assert fewest <= count <= 1.05 * fewest
    assert sequences.packed([100] * 3 + [250], 100) == 6
    assert sequences.packed([60, 40, 50, 30, 20], 100) == 2


def test_samples_show_the_mask_and_no_escapes(make_model, prepare):
    model = make_model(CHATML)
    result = prepare(model, lines({"messages": [
        {"role": "user", "content": "red \x1b[31m"},
        {"role": "assistant", "content": "hello"}]}))
    assert "[[hello<|im_end|>]]" in result.out
    assert "\x1b" not in result.out and "\\x1b[31m" in result.out


def test_quiet_prints_nothing(make_model, prepare):
    result = prepare(make_model(), texts("hello"), "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")
