"""What a Hugging Face folder says about text: tokenizer, template, stops."""

import datetime
import hashlib
import json
import os

import tokenizers

from .chat_template import ChatTemplate
from .errors import InputError


class ModelFolder:
    """The parts of a model folder that decide how text becomes tokens."""

    def __init__(self, folder, date=None):
        if not os.path.isdir(folder):
            raise InputError(folder, "no such folder (--model wants a Hugging"
                             " Face model folder)")
        self.folder = folder
        path = os.path.join(folder, "tokenizer.json")
        data = _read(path)
        if data is None:
            raise InputError(path, "not found; slidedp-prepare reads fast"
                             " tokenizers only (tokenizer.json)")
        self.tokenizer_sha256 = hashlib.sha256(data).hexdigest()
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(
                _with_whole_offsets(data))
        except Exception as error:  # the library raises bare Exception
            raise InputError(path, f"not a tokenizer: {error}") from None
        # Files saved after a training run carry that run's limits.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

        self._config = _read_json(os.path.join(folder, "tokenizer_config.json"))
        self._model_config = _read_json(os.path.join(folder, "config.json"))
        self._generation = _read_json(
            os.path.join(folder, "generation_config.json"))
        self.special_tokens = self._named_special_tokens()
        self.eos_id = self._eos_id()
        self.stop_ids = self._stop_ids()
        self.vocab_size = self._vocab_size()
        self.chat_template = self._chat_template(date or datetime.datetime.now())

    def token(self, token_id):
        return self.tokenizer.id_to_token(token_id)

    def _named_special_tokens(self):
        """bos_token, eos_token ... as chat templates use them."""
        named = {}
        for key, value in self._config.items():
            if key.endswith("_token"):
                if isinstance(value, dict):  # a serialised AddedToken
                    value = value.get("content")
                if isinstance(value, str):
                    named[key] = value
        return named

    def _eos_id(self):
        name = self.special_tokens.get("eos_token")
        if name is not None:
            found = self.tokenizer.token_to_id(name)
            if found is None:
                raise InputError(
                    os.path.join(self.folder, "tokenizer_config.json"),
                    f"'{name}' is not in tokenizer.json", field="eos_token")
            return found
        ids = _ids(self._generation) or _ids(self._model_config)
        if not ids:
            raise InputError(
                self.folder, "no end-of-text token: eos_token is not in"
                " tokenizer_config.json and eos_token_id neither in"
                " generation_config.json nor in config.json")
        return ids[0]

    def _stop_ids(self):
        """Ids at which generation stops; a turn may end with any of them."""
        ids = {self.eos_id, *_ids(self._generation), *_ids(self._model_config)}
        return {i for i in ids if self.tokenizer.id_to_token(i) is not None}

    def _vocab_size(self):
        config = self._model_config
        if isinstance(config.get("text_config"), dict):
            config = config["text_config"]
        size = config.get("vocab_size")
        return size if isinstance(size, int) and size > 0 else None

    def _chat_template(self, date):
        path = os.path.join(self.folder, "chat_template.jinja")
        data = _read(path)
        if data is not None:
            source = data.decode("utf-8", errors="replace")
        else:
            path = os.path.join(self.folder, "tokenizer_config.json")
            source = self._config.get("chat_template")
            if isinstance(source, list):  # several, by name
                source = {entry.get("name"): entry.get("template")
                          for entry in source
                          if isinstance(entry, dict)}.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise InputError(path, "is not a string", field="chat_template")
        stops = [self.token(i) for i in sorted(self.stop_ids)]
        return ChatTemplate(source, path, self.special_tokens, stops, date)


def _with_whole_offsets(data):
    """tokenizer.json, changed so that a token's offsets take in its white
    space: post-processors may trim it, and a loss mask goes by offsets."""
    content = json.loads(data)

    def visit(processor):
        if isinstance(processor, dict):
            if "trim_offsets" in processor:
                processor["trim_offsets"] = False
            for inner in processor.get("processors", []):
                visit(inner)

    if isinstance(content, dict):
        visit(content.get("post_processor"))
    return json.dumps(content, ensure_ascii=False)


def _ids(config):
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and v >= 0]


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(path, f"cannot read: {error.strerror}") from None


def _read_json(path):
    data = _read(path)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(path, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(path, "is not a JSON object")
    return value
