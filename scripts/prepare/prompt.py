"""One chat prompt to token ids, and generated ids back to text.

  python -P -m prepare.prompt stops DIR         -> 2,7
  python -P -m prepare.prompt encode DIR TEXT   -> 1,2,3
  python -P -m prepare.prompt decode DIR 4,5,6  -> text
"""

import argparse
import sys

from .errors import InputError
from .chat_template import TemplateFailure
from .model_folder import ModelFolder


def encode(model, text):
    """As a user's turn if the model has a chat template."""
    if model.chat_template is None:
        return model.tokenizer.encode(text).ids
    rendered = model.chat_template.render(
        [{"role": "user", "content": text}], add_generation_prompt=True)
    return model.tokenizer.encode(rendered, add_special_tokens=False).ids


def decode(model, ids):
    """Up to the first stop token, which is left out."""
    kept = []
    for token in ids:
        if token in model.stop_ids:
            break
        kept.append(token)
    return model.tokenizer.decode(kept, skip_special_tokens=False)


def main():
    parser = argparse.ArgumentParser(prog="prompt")
    parser.add_argument("verb", choices=("encode", "decode", "stops"))
    parser.add_argument("model")
    parser.add_argument("value", nargs="?", default="")
    options = parser.parse_args()
    try:
        model = ModelFolder(options.model)
        if options.verb == "stops":
            print(",".join(map(str, sorted(model.stop_ids))))
        elif options.verb == "encode":
            print(",".join(map(str, encode(model, options.value))))
        else:
            ids = [int(token) for token in options.value.split(",") if token]
            print(decode(model, ids))
    except (InputError, TemplateFailure) as error:
        print(f"prompt: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
