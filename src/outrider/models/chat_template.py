"""From a list of chat messages to the text that the model was trained to see."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from outrider.errors import ModelFileError, OutriderError, RequestError
from outrider.models.loader.hf_config import read_chat_template
from outrider.models.template_sandbox import (
    MAX_CHARS,
    BoundedEnvironment,
    TemplateLimit,
    TemplateRefusal,
    render_bounded,
)
from outrider.models.tokenizer import Tokenizer

MAX_SOURCE_CHARS = 512 * 1024

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplate:
    """A compiled template. Immutable, safe to share between threads.

    `is_own`: the model brings it; False for the built-in ChatML. `reason` says the same for a person.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        is_own: bool = True,
        reason: str = "the model's own",
    ) -> None:
        """Raises `ModelFileError` if `source` is no jinja template or uses what is not allowed."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFileError(
                f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed. "
                "Give another template"
            )
        self.source = source
        self.is_own = is_own
        self.reason = reason
        self._names = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = BoundedEnvironment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(
                f"the chat template is not valid at line {error.lineno}: {_one_line(error.message)}. "
                "Give another template"
            ) from None
        except Exception as error:  # Python's own compiler has limits: nesting, recursion, memory
            raise ModelFileError(
                f"the chat template cannot be compiled: {_one_line(error)}. Give another template"
            ) from None

    @classmethod
    def for_tokenizer(cls, source: str | None, tokenizer: Tokenizer) -> ChatTemplate:
        """The model's template, or the built-in ChatML if it has none."""
        bos = _text_of(tokenizer, tokenizer.bos_id)
        eos = _text_of(tokenizer, next(iter(tokenizer.eos_ids), None))
        if source is not None:
            return cls(source, bos_token=bos, eos_token=eos)
        marks = [tokenizer.token_id(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        reason = "the model has no chat template; ChatML, because its vocabulary has ChatML's markers"
        if None in marks:
            reason = "the model has no chat template; ChatML as plain text: its markers are no tokens of this model"
        return cls(CHATML, bos_token=bos, eos_token=eos, is_own=False, reason=reason)

    @classmethod
    def from_folder(cls, path: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """From `chat_template.jinja`, or `tokenizer_config.json`, of a Hugging Face folder; else ChatML."""
        return cls.for_tokenizer(read_chat_template(Path(path)), tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """`variables` are given to the template as they are (JSON values).

        Raises `RequestError` for malformed messages or messages that the template refuses, and `ModelFileError` for a
        template that breaks the sandbox or its bounds.
        """
        checked = [_message(message, index) for index, message in enumerate(_nonempty(messages))]
        _check_size(checked)
        names = {
            **self._names,
            **variables,
            "messages": checked,
            "tools": None if not tools else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_bounded(lambda: self._template.generate(names))
        except TemplateRefusal as error:
            raise RequestError(f"the chat template refuses these messages: {_one_line(error)}") from None
        except TemplateLimit as error:
            raise ModelFileError(
                f"the chat template was stopped: it needs {_one_line(error)}. Give another template"
            ) from None
        except SecurityError as error:
            raise ModelFileError(
                f"the chat template is unsafe and was stopped: {_one_line(error)}. Give another template"
            ) from None
        except (RecursionError, MemoryError):
            raise ModelFileError(
                "the chat template was stopped: it nests or grows without end. Give another template"
            ) from None
        except OutriderError:
            raise
        except Exception as error:  # whatever a template's own expressions raise
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {_one_line(error)}"
            ) from None


def _nonempty(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}; a list of messages is needed")
    if not messages:
        raise RequestError("messages is empty; at least one message is needed")
    return messages


def _check_size(messages: Sequence[Mapping[str, object]]) -> None:
    n_chars = sum(len(content) for message in messages if isinstance(content := message["content"], str))
    if n_chars > MAX_CHARS // 2:
        raise RequestError(f"messages hold {n_chars} characters; at most {MAX_CHARS // 2} are allowed. Shorten them")


def _message(message: Mapping[str, object], index: int) -> dict[str, object]:
    """A checked copy with its content as one string and tool call arguments as objects, as templates expect them."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}; an object with role and content is needed")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r}; a role such as 'system', 'user' or 'assistant' is needed")
    copy = dict(message)
    calls = message.get("tool_calls")
    if calls:
        copy["tool_calls"] = _tool_calls(calls, where)
    copy["content"] = _content(message.get("content"), f"{where}.content", optional=bool(calls))
    return copy


def _content(content: object, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        found = "missing" if content is None else f"a {type(content).__name__}"
        raise RequestError(f"{where} is {found}; a string or a list of text parts is needed")
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f'{where} is a {type(part).__name__}; an object {{"type": "text", "text": ...}} is needed')
    if part.get("type") != "text":
        raise RequestError(f"{where}.type is {part.get('type')!r}; only 'text' is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is {text!r}; a string is needed")
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, object]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls is a {type(calls).__name__}; a list is needed")
    copies: list[dict[str, object]] = []
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RequestError(f"{where}.tool_calls[{index}] is a {type(call).__name__}; an object is needed")
        copy = dict(call)
        function = copy.get("function")
        if isinstance(function, Mapping):
            copy["function"] = {**function, "arguments": _as_object(function.get("arguments"))}
        copies.append(copy)
    return copies


def _as_object(arguments: object) -> object:
    """Clients send arguments as JSON text; templates print objects."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _text_of(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _one_line(message: object) -> str:
    text = " ".join(str(message).split())
    return text if len(text) <= 200 else text[:197] + "..."
