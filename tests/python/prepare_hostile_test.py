"""Bad input: one line that names file, line and field; no output file."""

import json
import os
import stat

import pytest

from conftest import CHATML

GOOD = json.dumps({"messages": [{"role": "user", "content": "a"},
                                {"role": "assistant", "content": "b"}]})


def messages(value):
    return json.dumps({"messages": value})


@pytest.mark.parametrize("line, expected", [
    ("{", ["not JSON"]),
    ("{}{}", ["not JSON"]),
    ("[" * 100000, ["nested too deep"]),
    ('{"messages": ' + "9" * 5000 + "}", ["not JSON"]),
    ("7", ["wants a JSON object, has a number"]),
    ("{}", ["field 'messages'", "has nothing"]),
    (messages([]), ["field 'messages'", "empty list"]),
    (messages("hi"), ["field 'messages'", "a string"]),
    (messages(["hi"]), ["field 'messages[0]'", "a string"]),
    (messages([{"content": "x"}]), ["field 'messages[0].role'"]),
    (messages([{"role": 1, "content": "x"}]), ["field 'messages[0].role'"]),
    (messages([{"role": "user"}]),
     ["field 'messages[0].content'", "is missing"]),
    (messages([{"role": "user", "content": {"a": 1}}]),
     ["field 'messages[0].content'", "an object"]),
    (messages([{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
     ["field 'messages[0].content'", "only plain text"]),
    (messages([{"role": "user", "content": "x"}]),
     ["field 'messages'", "'assistant'"]),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}',
     ["surrogate", "\\ud800"]),
])
def test_bad_chat_line_is_named(make_model, prepare, line, expected):
    result = prepare(make_model(CHATML), f"{GOOD}\n\n{line}\n{GOOD}\n",
                     "--format", "chat")
    assert result.code == 1
    for part in ["input.jsonl:3", *expected]:
        assert part in result.err
    assert result.err.count("\n") == 1
    assert not result.output.exists()
    assert result.out == ""


@pytest.mark.parametrize("record, expected", [
    ({"instruction": "a"}, "field 'output': is missing"),
    ({"instruction": "a", "output": ""}, "field 'output': is empty"),
    ({"instruction": " ", "output": "b"}, "field 'instruction': is empty"),
    ({"instruction": "a", "output": ["b"]}, "field 'output': wants a string"),
    ({"instruction": "a", "input": 3, "output": "b"},
     "field 'input': wants a string"),
])
def test_bad_alpaca_item_is_named_by_line(make_model, prepare, record,
                                          expected):
    good = {"instruction": "a", "output": "b"}
    content = json.dumps([good, record], indent=1)
    line = content[:content.rindex("{")].count("\n") + 1
    result = prepare(make_model(), content, "--format", "alpaca",
                     name="a.json")
    assert result.code == 1
    assert expected in result.err
    assert f"a.json:{line}" in result.err


@pytest.mark.parametrize("content, expected", [
    ('[{"text": "a"}', "a.json:1: not JSON: wants ',' or ']'"),
    ('[{"text": "a"}\n{"text": "b"}]', "a.json:2: not JSON"),
    ('[{"text": "a"},]', "a.json:1: not JSON"),
    ('[{"text": "a"}] x', "behind the closing bracket"),
    ("[]", "holds no record"),
    ("", "holds no record"),
    ('[{"title": "a"}]', "say --format"),
])
def test_broken_json_files(make_model, prepare, content, expected):
    result = prepare(make_model(), content, name="a.json")
    assert result.code == 1
    assert expected in result.err


def test_bad_utf8_is_named_by_line(make_model, prepare):
    content = b'{"text": "a"}\n{"text": "\xff"}\n'
    result = prepare(make_model(), content)
    assert result.code == 1
    assert "input.jsonl:2" in result.err and "0xff" in result.err
    result = prepare(make_model(), b"a\nb\n\xc3", name="a.txt")
    assert "a.txt:3" in result.err


def test_chat_without_a_template_is_refused(make_model, prepare):
    result = prepare(make_model(), GOOD)
    assert result.code == 1
    assert "no chat template" in result.err


def test_tokenizer_of_another_model_is_refused(make_model, prepare):
    result = prepare(make_model(vocab_size=100), '{"text": "hello"}')
    assert result.code == 1
    assert "outside the model's vocabulary of 100" in result.err


def test_eos_that_the_tokenizer_does_not_know(make_model, prepare):
    result = prepare(make_model(eos="<none>"), '{"text": "hello"}')
    assert result.code == 1
    assert "'<none>'" in result.err and "eos_token" in result.err


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b"{" * 3000])
def test_bad_tokenizer_file(make_model, prepare, data):
    model = make_model()
    (model / "tokenizer.json").write_bytes(data)
    result = prepare(model, '{"text": "hello"}')
    assert result.code == 1
    assert "tokenizer.json" in result.err and result.err.count("\n") == 1


def test_missing_files_are_named(make_model, prepare, tmp_path):
    result = prepare(tmp_path / "none", "x", name="a.txt")
    assert result.code == 1 and "no such folder" in result.err
    model = make_model()
    os.unlink(model / "tokenizer.json")
    result = prepare(model, "x", name="a.txt")
    assert result.code == 1 and "tokenizer.json: not found" in result.err


def test_nothing_but_empty_texts(make_model, prepare):
    result = prepare(make_model(), '{"text": ""}\n')
    assert result.code == 1 and "no text at all" in result.err


def test_mixed_formats_want_a_layout(make_model, prepare, tmp_path):
    (tmp_path / "b.txt").write_text("hello")
    from prepare import cli
    model = make_model(CHATML)
    arguments = ["--model", str(model), "--input", str(tmp_path / "b.txt"),
                 str(tmp_path / "input.jsonl"), "--output",
                 str(tmp_path / "o.safetensors")]
    (tmp_path / "input.jsonl").write_text(GOOD)
    assert cli.main(arguments) == 1
    assert not (tmp_path / "o.safetensors").exists()
    assert cli.main(arguments + ["--layout", "documents"]) == 0


def test_output_replaces_the_old_file_whole(make_model, prepare, tmp_path):
    model = make_model()
    output = tmp_path / "data.safetensors"
    output.write_text("old")
    assert prepare(model, "{").code == 1
    assert output.read_text() == "old"
    assert prepare(model, '{"text": "hello"}').code == 0
    assert output.read_bytes()[:3] != b"old"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(output.stat().st_mode) == 0o666 & ~umask
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_output_folder_that_is_not_there(make_model, prepare, tmp_path):
    from prepare import cli
    (tmp_path / "a.txt").write_text("hello")
    code = cli.main(["--model", str(make_model()), "--input",
                     str(tmp_path / "a.txt"), "--output",
                     str(tmp_path / "none" / "o.safetensors")])
    assert code == 1
