"""Chat templates, and which part of a rendered chat the assistant said.

Templates come with models from anywhere, so they run in jinja2's immutable
sandbox, with what transformers gives them: raise_exception, strftime_now,
tojson, loop controls and {% generation %}.

Assistant spans (half open, in characters of the rendered text) come from
1. {% generation %} blocks, if the template has any; else
2. rendering prefixes: a turn begins where the messages before it end with the
   generation prompt added, and ends where the messages up to it end. Both must
   be true prefixes of the whole; where the second is not (a template that
   rewrites older turns), the turn ends after the first stop token.
White space that follows a turn's stop token is never part of the span: a model
that has stopped does not write it.
"""

import json
import secrets

import jinja2
import jinja2.ext
import jinja2.sandbox

from .errors import InputError


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: wraps its output in marks."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        parser.environment.has_generation = True
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller):
        begin, end = self.environment.generation_marks
        return begin + caller() + end


class ChatTemplate:

    def __init__(self, source, path, special_tokens, stop_tokens, date):
        """`date` is what strftime_now tells: fixed, so that one run renders
        every chat alike."""
        self._path = path
        self._special_tokens = special_tokens
        self._stop_tokens = stop_tokens
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.has_generation = False
        # Private-use characters around a random word: no text holds them.
        word = secrets.token_hex(8)
        environment.generation_marks = (f"\ue000{word}\ue001",
                                        f"\ue002{word}\ue001")
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = date.strftime
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InputError(path, f"not a template: {error}") from None
        self._marks = environment.generation_marks
        self._has_generation = environment.has_generation

    def render(self, messages, tools=None, add_generation_prompt=False):
        """Plain text. Raises TemplateFailure."""
        text = self._render(messages, tools, add_generation_prompt)
        for mark in self._marks:
            text = text.replace(mark, "")
        return text

    def render_with_spans(self, messages, tools=None):
        """(text, assistant spans). Raises TemplateFailure."""
        if self._has_generation:
            text, spans = self._cut_marks(self._render(messages, tools, False))
        else:
            text = self._render(messages, tools, False)
            spans = self._spans_by_prefix(text, messages, tools)
        spans = [self._without_tail(text, span) for span in spans]
        return text, [span for span in spans if span[0] < span[1]]

    def _render(self, messages, tools, add_generation_prompt):
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens)
        except Exception as error:  # a template can raise anything
            raise TemplateFailure(
                f"the chat template refuses it: {error or type(error).__name__}"
                f" ({self._path})") from None

    def _cut_marks(self, marked):
        begin_mark, end_mark = self._marks
        parts, spans, length = [], [], 0
        rest = marked
        while True:
            before, found, rest = rest.partition(begin_mark)
            parts.append(before)
            length += len(before)
            if not found:
                return "".join(parts), spans
            inside, found, rest = rest.partition(end_mark)
            if not found or begin_mark in inside:
                raise TemplateFailure(
                    f"{{% generation %}} blocks of {self._path} are nested or"
                    " cut by a filter")
            parts.append(inside)
            spans.append((length, length + len(inside)))
            length += len(inside)

    def _spans_by_prefix(self, text, messages, tools):
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:i], tools, True)
            if not text.startswith(before):
                raise TemplateFailure(
                    f"cannot tell what the assistant said in message {i}: the"
                    " messages before it, rendered with the generation prompt,"
                    f" are not a prefix of the whole ({self._path}); put"
                    " {% generation %} blocks into the template")
            after = text
            if i + 1 < len(messages):
                after = self._render(messages[:i + 1], tools, False)
            if text.startswith(after) and len(after) >= len(before):
                end = len(after)
            else:
                end = self._end_by_stop(text, len(before), i, message)
            spans.append((len(before), end))
        for (_, end), (begin, _) in zip(spans, spans[1:]):
            if begin < end:
                raise TemplateFailure(
                    "assistant turns overlap in the rendered chat"
                    f" ({self._path}); put {{% generation %}} blocks into the"
                    " template")
        return spans

    def _end_by_stop(self, text, begin, i, message):
        ends = [position + len(token) for token in self._stop_tokens
                if (position := text.find(token, begin)) >= 0]
        end = min(ends, default=-1)
        content = message.get("content")
        if (end < 0 or not isinstance(content, str)
                or content.strip() not in text[begin:end]):
            raise TemplateFailure(
                f"cannot tell where the assistant's message {i} ends: the chat"
                f" template ({self._path}) renders it differently when"
                " messages follow, and no stop token ends it; put"
                " {% generation %} blocks into the template")
        return end

    def _without_tail(self, text, span):
        """Cuts white space after a stop token, and takes in a stop token that
        follows the span at once (a {% generation %} block around the words
        only must still teach to stop)."""
        begin, end = span
        body = text[begin:end]
        kept = body.rstrip()
        if any(kept.endswith(token) for token in self._stop_tokens):
            return begin, begin + len(kept)
        for token in self._stop_tokens:
            if text.startswith(token, end):
                return begin, end + len(token)
        return span

    def ends_with_stop(self, text, span):
        return any(text[span[0]:span[1]].endswith(token)
                   for token in self._stop_tokens)


class TemplateFailure(Exception):
    """This chat cannot be rendered; the caller knows its file and line."""


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None,
            sort_keys=False):
    # Not jinja2's own: that one escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                      separators=separators, sort_keys=sort_keys)
