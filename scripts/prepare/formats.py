"""Reads input files into documents: text, and which part of it is learnt.

Every line is hostile: a bad one is an InputError that names file, line and
field.
"""

import dataclasses
import json
import os

from .chat_template import TemplateFailure
from .errors import InputError

FORMATS = ("text", "jsonl", "chat", "alpaca")

# The prompts of the Stanford Alpaca project, for models without a template.
_ALPACA_TASK = (
    "Below is an instruction that describes a task{}. Write a response that"
    " appropriately completes the request.\n\n### Instruction:\n")
_ALPACA_PLAIN = _ALPACA_TASK.format("")
_ALPACA_PAIRED = _ALPACA_TASK.format(
    ", paired with an input that provides further context")


@dataclasses.dataclass
class Document:
    where: str          # "file:line", for messages
    text: str
    # Learnt characters, half-open; None: everything.
    spans: list | None
    # The tokenizer's own BOS and the like; False where a chat template has
    # written them into the text.
    add_special_tokens: bool
    # Whether an end-of-text token belongs behind the last token.
    append_eos: bool
    # False: the next document continues this one (a piece of a large file).
    ends: bool = True


def detect_format(path):
    """By name, and for JSON by the fields of the first record."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".json", ".jsonl", ".ndjson"):
        return "text"
    for _, record in _records(path):
        if isinstance(record, dict):
            if "messages" in record:
                return "chat"
            if "instruction" in record:
                return "alpaca"
            if "text" in record:
                return "jsonl"
        raise InputError(
            path, "cannot tell its format: the first record has none of the"
            " fields 'text', 'messages', 'instruction'; say --format")
    raise InputError(path, "holds no record")


def read_documents(path, format_name, model):
    """Yields Documents in the file's order."""
    if format_name == "text":
        yield from _read_text(path, model)
        return
    convert = {"jsonl": _from_jsonl, "chat": _from_chat,
               "alpaca": _from_alpaca}[format_name]
    for where, record in _records(path):
        if not isinstance(record, dict):
            raise InputError(where, f"wants a JSON object, has"
                             f" {_kind(record)}")
        yield convert(where, record, model)


def _from_jsonl(where, record, model):
    text = _text_field(where, record, "text")
    return Document(where, text, None, True, True)


def _from_chat(where, record, model):
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InputError(where, "wants a list of at least one message, has"
                         f" {_kind(messages)}", field="messages")
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InputError(where, f"wants an object, has {_kind(message)}",
                             field=name)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InputError(where, f"wants a string, has {_kind(role)}",
                             field=f"{name}.role")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if isinstance(content, list):
            raise InputError(where, "is a list of parts; only plain text is"
                             " supported", field=f"{name}.content")
        _text_field(where, message, "content", f"{name}.content")
    if not any(m["role"] == "assistant" for m in messages):
        roles = sorted({m["role"] for m in messages})
        raise InputError(where, "no message of role 'assistant', so nothing to"
                         f" learn (roles: {', '.join(roles)})",
                         field="messages")
    if model.chat_template is None:
        raise InputError(model.folder, "has no chat template (neither"
                         " chat_template.jinja nor chat_template in"
                         " tokenizer_config.json); chats need one")
    return _through_template(where, messages, record.get("tools"), model)


def _from_alpaca(where, record, model):
    instruction = _text_field(where, record, "instruction")
    output = _text_field(where, record, "output")
    extra = (_text_field(where, record, "input")
             if record.get("input") is not None else "")
    for field, value in (("instruction", instruction), ("output", output)):
        if not value.strip():
            raise InputError(where, "is empty", field=field)
    if model.chat_template is not None:
        question = f"{instruction}\n\n{extra}" if extra else instruction
        messages = [{"role": "user", "content": question},
                    {"role": "assistant", "content": output}]
        return _through_template(where, messages, None, model)
    prompt = _ALPACA_PLAIN + instruction
    if extra:
        prompt = _ALPACA_PAIRED + instruction + "\n\n### Input:\n" + extra
    prompt += "\n\n### Response:\n"
    return Document(where, prompt + output,
                    [(len(prompt), len(prompt) + len(output))], True, True)


def _through_template(where, messages, tools, model):
    template = model.chat_template
    try:
        text, spans = template.render_with_spans(messages, tools)
    except TemplateFailure as error:
        raise InputError(where, str(error)) from None
    _check_encodable(where, text, None)
    if not spans:
        raise InputError(where, "the chat template leaves nothing of the"
                         " assistant's messages", field="messages")
    # The end of turn comes from the template; some have none.
    append_eos = (not template.ends_with_stop(text, spans[-1])
                  and not text[spans[-1][1]:].strip())
    if append_eos:
        text = text[:spans[-1][1]]
    return Document(where, text, spans, False, append_eos)


def _text_field(where, record, field, name=None):
    name = name or field
    if field not in record:
        have = ", ".join(f"'{key}'" for key in list(record)[:8]) or "none"
        raise InputError(where, f"is missing (fields here: {have})",
                         field=name)
    value = record[field]
    if not isinstance(value, str):
        raise InputError(where, f"wants a string, has {_kind(value)}",
                         field=name)
    _check_encodable(where, value, name)
    return value


def _check_encodable(where, text, field):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InputError(where, f"half of a surrogate pair, \\u{code:04x}, at"
                         f" character {error.start}", field=field) from None


def _kind(value):
    if value is None:
        return "nothing"
    if isinstance(value, (list, dict, str)) and not value:
        return f"an empty {type(value).__name__}"
    return {str: "a string", list: "a list", dict: "an object",
            bool: "a boolean", int: "a number", float: "a number"}[type(value)]


# ---- Files ----

_PIECE_BYTES = 1 << 20
_JOINTS_TRIED = 64


def _read_text(path, model):
    """One document; a large file comes in pieces, cut at line ends where
    cutting provably gives the tokens of the whole."""
    text = _decode(path, _read_bytes(path), 1)
    if text.startswith("\ufeff"):
        text = text[1:]
    begin, first_line = 0, 1
    while len(text) - begin > 2 * _PIECE_BYTES:
        end = _joint(text, begin + _PIECE_BYTES, model)
        if end is None:
            break
        yield Document(f"{path}:{first_line}", text[begin:end], None,
                       begin == 0, False, ends=False)
        first_line += text.count("\n", begin, end)
        begin = end
    yield Document(f"{path}:{first_line}", text[begin:], None, begin == 0,
                   True)


def _joint(text, position, model):
    """A line end near `position` over which no token reaches."""
    def ids(part):
        return model.tokenizer.encode(part, add_special_tokens=False).ids

    for _ in range(_JOINTS_TRIED):
        position = text.find("\n", position) + 1
        if position == 0:
            return None
        before = text[max(0, position - 256):position]
        after = text[position:position + 256]
        if ids(before) + ids(after) == ids(before + after):
            return position
    return None


def _records(path):
    """(where, value) of each JSON value: a JSON array's items, or one value a
    line. Decided by the first character, as names do not tell."""
    data = _read_bytes(path)
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    if data.lstrip()[:1] == b"[":
        yield from _array_items(path, data)
        return
    # Only newlines end a line: str.splitlines would cut at U+2028 as well.
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        text = _decode(path, line, number)
        try:
            yield where, json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _bad_json(where, error) from None


def _array_items(path, data):
    text = _decode(path, data, 1)
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    line, counted = 1, 0
    first = True
    while True:
        position = _skip_space(text, position)
        if text[position:position + 1] == "]":
            if text[position + 1:].strip():
                raise InputError(path, "has text behind the closing bracket")
            return
        if not first:
            if text[position:position + 1] != ",":
                line += text.count("\n", counted, position)
                raise InputError(f"{path}:{line}", "not JSON: wants ',' or ']'"
                                 " behind an item")
            position = _skip_space(text, position + 1)
        first = False
        line += text.count("\n", counted, position)
        counted = position
        where = f"{path}:{line}"
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _bad_json(
                f"{path}:{getattr(error, 'lineno', line)}", error) from None
        yield where, value


def _skip_space(text, position):
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _bad_json(where, error):
    message = getattr(error, "msg", None) or str(error)
    if isinstance(error, RecursionError):
        message = "nested too deep"
    column = getattr(error, "colno", None)
    return InputError(where, f"not JSON: {message}"
                      + (f" (column {column})" if column else ""))


def _read_bytes(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(path, f"cannot read: {error.strerror}") from None


def _decode(path, data, first_line):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise InputError(
            f"{path}:{line}", f"not UTF-8: byte 0x{data[error.start]:02x} at"
            f" offset {error.start}; convert the file to UTF-8") from None
