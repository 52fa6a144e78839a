"""Shows a person what will be learnt: decoded text with its loss mask."""

import itertools

_LEARNT, _GIVEN, _PLAIN = "\033[32m", "\033[2m", "\033[0m"
_RUN_CHARACTERS = 400


def sample(document, tokenizer, colours):
    """The text; learnt parts green, or between [[ and ]] without colours."""
    parts = []
    pairs = zip(document.ids.tolist(), document.mask.tolist())
    for learnt, run in itertools.groupby(pairs, lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run],
                                skip_special_tokens=False)
        text = _shorten(_printable(text))
        if colours:
            parts.append((_LEARNT if learnt else _GIVEN) + text + _PLAIN)
        else:
            parts.append(f"[[{text}]]" if learnt else text)
    return "".join(parts)


def choose(documents, count=3):
    """Evenly spread, the first among them."""
    count = min(count, len(documents))
    return [documents[i * len(documents) // count] for i in range(count)]


def _shorten(text):
    if len(text) <= _RUN_CHARACTERS:
        return text
    half = _RUN_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"


def _printable(text):
    # Data can hold terminal escapes.
    return "".join(c if c.isprintable() or c == "\n" else
                   c.encode("unicode_escape").decode() for c in text)
