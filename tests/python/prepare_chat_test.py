"""Which part of a chat is learnt, to the character."""

import json

import pytest

from conftest import CHATML, texts_by_mask

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}")

# Only the last turn keeps its thoughts, as Qwen3's does.
REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}"
    "{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}")

NO_STOP = ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}"
           "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}"
           "{% endif %}")


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return json.dumps({"messages": [
        {"role": roles[turn[0]], "content": turn[2:]} for turn in turns]})


def test_only_assistant_turns_and_their_end_are_learnt(make_model, prepare):
    model = make_model(CHATML)
    result = prepare(model, chat("s:be brief", "u:hello", "a:hello to you",
                                 "u:and?", "a:nothing") + "\n")
    assert result.code == 0, result.err
    tensors, metadata = result.read()
    assert texts_by_mask(model, tensors) == [[
        (False, "<|im_start|>system\nbe brief<|im_end|>\n"
         "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"),
        (True, "hello to you<|im_end|>"),
        (False, "\n<|im_start|>user\nand?<|im_end|>\n"
         "<|im_start|>assistant\n"),
        (True, "nothing<|im_end|>"),
        (False, "\n"),
    ]]
    assert metadata["layout"] == "documents"
    assert metadata["source_format"] == "chat"


def test_template_writes_bos_so_the_tokenizer_does_not(make_model, prepare):
    model = make_model(LLAMA3, bos=True)
    tensors, _ = prepare(model, chat("u: hello ", "a: hi ")).read()
    assert texts_by_mask(model, tensors) == [[
        (False, "<s><|im_start|>user\n\nhello<|im_end|>"
         "<|im_start|>assistant\n\n"),
        (True, "hi<|im_end|>")]]


def test_trimmed_offsets_lose_no_learnt_white_space(make_model, prepare):
    model = make_model(CHATML, trim_offsets=True)
    tensors, _ = prepare(model, chat("u:hello", "a: hello  \n\n x")).read()
    assert texts_by_mask(model, tensors)[0][1] == (
        True, " hello  \n\n x<|im_end|>")


def test_token_that_straddles_the_border_is_learnt(make_model, prepare):
    # "\n\n" is one token: its first half is the template's, its second the
    # assistant's.
    model = make_model(CHATML)
    tensors, _ = prepare(model, chat("u:hello", "a:\n\nyes")).read()
    assert texts_by_mask(model, tensors)[0][1] == (
        True, "\n\n\nyes<|im_end|>")


def test_characters_of_several_tokens_are_learnt_whole(make_model, prepare):
    model = make_model(CHATML)
    tensors, _ = prepare(model, chat("u:\u00e9\U0001f600",
                                     "a:\u6d77\U0001f30a!")).read()
    assert texts_by_mask(model, tensors)[0][1] == (
        True, "\u6d77\U0001f30a!<|im_end|>")


def test_rewritten_older_turns_end_at_their_stop_token(make_model, prepare):
    model = make_model(REWRITING)
    tensors, _ = prepare(model, chat("u:one", "a:first", "u:two",
                                     "a:second")).read()
    learnt = [text for flag, text in texts_by_mask(model, tensors)[0] if flag]
    assert learnt == ["first<|im_end|>", "<think></think>second<|im_end|>"]


def test_rewritten_turn_without_stop_token_is_refused(make_model, prepare):
    model = make_model(REWRITING.replace("<|im_end|>", "###"))
    result = prepare(model, chat("u:one", "a:first", "u:two", "a:second"))
    assert result.code == 1
    assert "input.jsonl:1" in result.err and "{% generation %}" in result.err


def test_template_whose_prompt_is_no_prefix_is_refused(make_model, prepare):
    model = make_model("{{ messages | length }}" + CHATML)
    result = prepare(model, chat("u:one", "a:first"))
    assert result.code == 1
    assert "not a prefix" in result.err


def test_generation_blocks_take_in_the_end_of_turn(make_model, prepare):
    model = make_model(GENERATION)
    tensors, _ = prepare(model, chat("u:one", "a:first", "u:two",
                                     "a:second")).read()
    learnt = [text for flag, text in texts_by_mask(model, tensors)[0] if flag]
    assert learnt == ["first<|im_end|>", "second<|im_end|>"]


def test_missing_end_of_turn_becomes_eos_at_the_end_only(make_model, prepare):
    model = make_model(NO_STOP, eos="<|end|>")
    tensors, _ = prepare(model, chat("u:one", "a:first", "u:two",
                                     "a:second")).read()
    text = "".join(t for _, t in texts_by_mask(model, tensors)[0])
    assert text == ("user: one\nassistant: first\nuser: two\n"
                    "assistant: second\n<|end|>")


def test_chat_that_ends_with_the_user_gets_no_eos(make_model, prepare):
    model = make_model(CHATML)
    tensors, _ = prepare(model, chat("u:one", "a:first", "u:two")).read()
    assert texts_by_mask(model, tensors)[0][-1] == (
        False, "\n<|im_start|>user\ntwo<|im_end|>\n")


def test_jinja_file_wins_over_tokenizer_config(make_model, prepare):
    model = make_model("wrong", jinja_file=CHATML)
    tensors, _ = prepare(model, chat("u:one", "a:first")).read()
    assert texts_by_mask(model, tensors)[0][1] == (True, "first<|im_end|>")


def test_named_templates_give_the_default(make_model, prepare):
    model = make_model([{"name": "rag", "template": "wrong"},
                        {"name": "default", "template": CHATML}])
    tensors, _ = prepare(model, chat("u:one", "a:first")).read()
    assert texts_by_mask(model, tensors)[0][1] == (True, "first<|im_end|>")


def test_template_functions_of_transformers(make_model, prepare):
    model = make_model(
        "{{ strftime_now('%d %b %Y') }} {{ {'a': '<'} | tojson }}"
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% endfor %}" + CHATML)
    result = prepare(model, chat("u:one", "a:first"), "--date", "2024-07-26")
    tensors, _ = result.read()
    assert texts_by_mask(model, tensors)[0][0][1].startswith(
        '26 Jul 2024 {"a": "<"}<|im_start|>user')


@pytest.mark.parametrize("template, expected", [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ messages[99].content }}", "no element 99"),
    ("{% for %}", "not a template"),
    ("nothing of the chat", "not a prefix"),
])
def test_templates_fail_with_one_line(make_model, prepare, template, expected):
    if expected == "not a prefix":
        template += "{% if add_generation_prompt %}!{% endif %}"
    result = prepare(make_model(template), chat("u:one", "a:first"))
    assert result.code == 1
    assert expected in result.err
    assert result.err.count("\n") == 1


def test_spans_do_not_depend_on_marks_in_the_text(make_model, prepare):
    model = make_model(GENERATION)
    odd = "\ue000 \ue001 \ue002 {% generation %} {{ x }}"
    tensors, _ = prepare(model, chat("u:" + odd, "a:" + odd)).read()
    assert texts_by_mask(model, tensors)[0][1] == (True, odd + "<|im_end|>")


def test_what_is_asked_begins_what_was_learnt(make_model, prepare):
    from prepare import model_folder, prompt
    model = make_model(CHATML)
    tensors, _ = prepare(model, chat("u:hello to", "a:all")).read()
    folder = model_folder.ModelFolder(str(model))
    asked = prompt.encode(folder, "hello to")
    first_label = tensors["loss_mask"].tolist().index(1)
    assert tensors["input_ids"].tolist()[:first_label] == asked
    answer = tensors["input_ids"].tolist()[first_label:]
    assert prompt.decode(folder, answer) == "all"
