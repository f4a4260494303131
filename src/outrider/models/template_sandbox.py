"""A jinja2 environment for templates from strangers: no file, no attribute outside a list, bounded size and work.

Every value that a template can build is measured where it is built, so that no short template makes a long string, a
deep list or a long loop; `Meter` counts the work of one rendering.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType

from jinja2 import FunctionLoader, TemplateError, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARS = 4 * 1024 * 1024
MAX_STEPS = 500_000
MAX_RANGE = 10_000
MAX_SECONDS = 5.0
MAX_INT_BITS = 4096
ITEM_CHARS = 16

_FILTERS = """abs capitalize count d default dictsort first float groupby indent int items join last length list lower
map max min reject rejectattr replace reverse select selectattr sort string striptags title trim truncate unique upper
wordcount"""
_STRING_METHODS = """capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit
islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex
rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"""
_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    int: frozenset(),
    float: frozenset(("is_integer",)),
    bytes: frozenset(),
}


class TemplateRefusal(TemplateError):
    """The template itself called `raise_exception`: these messages are not for it."""


class TemplateLimit(SecurityError):
    """The template needs more output, memory or time than any chat needs."""


class Meter:
    """The work that one rendering has done. Every method raises `TemplateLimit` beyond its bound."""

    def __init__(self) -> None:
        self.n_steps = 0
        self.n_written_chars = 0
        self._deadline_s = time.monotonic() + MAX_SECONDS

    def step(self, n: int = 1) -> None:
        self.n_steps += n
        if self.n_steps > MAX_STEPS:
            raise TemplateLimit(f"more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline_s:
            raise TemplateLimit(f"more than {MAX_SECONDS:g} seconds")

    def write(self, n_chars: int) -> None:
        self.step()
        self.n_written_chars += n_chars
        if self.n_written_chars > 4 * MAX_CHARS:
            raise TemplateLimit(f"more than {4 * MAX_CHARS} characters written")


_meter: ContextVar[Meter] = ContextVar("outrider_template_meter")


def measure(value: object) -> None:
    """Raises `TemplateLimit` if `value` with all that it holds, `ITEM_CHARS` for each item and one for each character,
    is larger than `MAX_CHARS`."""
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        size += ITEM_CHARS
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, int):
            if item.bit_length() > MAX_INT_BITS:
                raise TemplateLimit(f"a number of more than {MAX_INT_BITS} bits")
            size += item.bit_length() // 3
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            stack.extend(item)
        elif isinstance(item, Namespace):
            raise TemplateLimit("a namespace used as a value")
        if size + ITEM_CHARS * len(stack) > MAX_CHARS:
            raise TemplateLimit(f"a value of more than {MAX_CHARS} characters")


def _checked(value: object) -> object:
    _meter.get().step()
    if not isinstance(value, Namespace):
        measure(value)
    return value


# The filters that `_Instrument` puts in take the context only so that jinja2 does not fold them when it compiles.


@pass_context
def _bound_value(_: Context, value: object) -> object:
    return _checked(value)


@pass_context
def _bound_text(_: Context, value: object) -> object:
    """What an output expression may print; counts it."""
    measure(value)
    _meter.get().write(len(value) if isinstance(value, str) else 64)
    return value


@pass_context
def _bound_concat(_: Context, parts: tuple[object, ...]) -> str:
    measure(parts)
    _meter.get().step()
    return "".join(map(str, parts))


class _Counted:
    """An iterable whose items each count as a step."""

    def __init__(self, items: Iterable[object]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[object]:
        meter = _meter.get()
        for item in self._items:
            meter.step()
            yield item


class _CountedSized(_Counted):
    def __init__(self, items: Iterable[object], n_items: int) -> None:
        super().__init__(items)
        self._n_items = n_items

    def __len__(self) -> int:
        return self._n_items


@pass_context
def _bound_loop(_: Context, items: Iterable[object]) -> _Counted:
    return _CountedSized(items, len(items)) if isinstance(items, Sized) else _Counted(items)


class _Instrument(NodeTransformer):
    """Puts the bounds around loops, literals, `~`, block assignments and long literal text."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_bound_loop")
        return node

    def visit_List(self, node: nodes.Literal) -> nodes.Expr:
        self.generic_visit(node)
        is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if is_target else _filtered(node, "_bound_value")

    visit_Dict = visit_Tuple = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_bound_concat")

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "_bound_value")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            _filtered(nodes.Const(child.data, lineno=child.lineno), "_bound_text")
            if isinstance(child, nodes.TemplateData) and len(child.data) > 64
            else child
            for child in node.nodes
        ]
        return node


def _filtered(node: nodes.Node | None, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=1 if node is None else node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part of a training template; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=_bound_text,
            loader=FunctionLoader(_no_file),
        )
        originals = self.filters
        self.filters = {name: _metered(originals[name]) for name in _FILTERS.split()}
        # Plain text in, plain text out: Markup's own methods would be outside the bounds.
        escape = _metered(_plain(originals["escape"]))
        self.filters.update(safe=_metered(str), e=escape, escape=escape)
        self.filters["replace"] = _metered(_replace)
        self.filters["join"] = _metered(_join)
        self.filters["indent"] = _metered(_indent(originals["indent"]))
        self.filters["tojson"] = _metered(_tojson)
        for bound in (_bound_value, _bound_text, _bound_concat, _bound_loop):
            self.filters[bound.__name__] = bound
        self.globals = {
            "range": _range,
            "dict": _dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Instrument().visit(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operands(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: object, *args: object, **kwargs: object) -> object:
        _meter.get().step()
        return _checked(super().call(context, obj, *args, **kwargs))

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        for kind, allowed in _ATTRIBUTES.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: object, attribute: str) -> Undefined:
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is not allowed")

    def wrap_str_format(self, value: object) -> Callable[..., str] | None:
        """Called by jinja2 on every attribute that it hands to a template."""
        if not (isinstance(value, BuiltinMethodType) and isinstance(value.__self__, str)):
            return None
        text: str = value.__self__
        if value.__name__ == "replace":
            return lambda old, new, count=-1: _replace(text, old, new, count)
        if value.__name__ == "join":
            return lambda items: _join(items, text)
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        inner = wrapped

        def format_bounded(*args: object, **kwargs: object) -> str:
            if re.search(r"\{[^{}]*[:!\[.]", text):
                raise SecurityError("str.format with a format specification, an index or an attribute is not allowed")
            measure([args, kwargs] * (1 + text.count("{")))
            return inner(*args, **kwargs)

        return format_bounded


def render_bounded(render: Callable[[], Iterable[str]]) -> str:
    """The concatenated output of `render`, within the bounds. Raises what the template raises, and `TemplateLimit`."""
    token = _meter.set(Meter())
    try:
        pieces, n_chars = [], 0
        for piece in render():
            n_chars += len(piece)
            if n_chars > MAX_CHARS:
                raise TemplateLimit(f"more than {MAX_CHARS} characters of output")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _meter.reset(token)


def _check_operands(operator: str, left: object, right: object) -> None:
    """What would be too large to build and then measure."""
    if operator == "*":
        for text, times in ((left, right), (right, left)):
            if isinstance(text, (str, list, tuple)) and isinstance(times, int) and len(text) * times > MAX_CHARS:
                raise TemplateLimit(f"a value of more than {MAX_CHARS} elements")
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
            raise TemplateLimit(f"a number of more than {MAX_INT_BITS} bits")
    elif operator == "%" and isinstance(left, str):
        if re.search(r"%[^%a-zA-Z]*(\*|\d{3})", left):
            raise SecurityError("a format width of more than two digits is not allowed")
        measure([right] * (1 + left.count("%")))


def _metered(function: Callable[..., object]) -> Callable[..., object]:
    @wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        _meter.get().step()
        return _checked(function(*args, **kwargs))

    return call


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    times = -1 if count is None else count
    if (text.count(old) + 1) * len(new) + len(text) > MAX_CHARS:
        raise TemplateLimit(f"a value of more than {MAX_CHARS} characters")
    return text.replace(old, new, times)


def _join(items: Iterable[object], separator: object = "", attribute: str | int | None = None) -> str:
    parts: list[object] = []
    for item in _Counted(items):
        if attribute is not None:
            item = item.get(attribute, "") if isinstance(item, dict) else ""
        parts.append(item)
    measure([parts, [separator] * len(parts)])
    return str(separator).join(map(str, parts))


def _plain(function: Callable[[str], str]) -> Callable[[object], str]:
    return lambda text: str(function(str(text)))


def _indent(function: Callable[..., str]) -> Callable[..., str]:
    def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        n_columns = width if isinstance(width, int) else len(width)
        if n_columns * (text.count("\n") + 1) + len(text) > MAX_CHARS:
            raise TemplateLimit(f"a value of more than {MAX_CHARS} characters")
        return function(text, width, first, blank)

    return indent


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it for chat templates: nothing escaped for HTML, key order kept."""
    measure(value)
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError(f"tojson(indent={indent}) is not allowed; 0 to 16 are")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _no_file(name: str) -> str:
    raise SecurityError(f"include, import and extends are not allowed (here of {name!r})")


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise TemplateLimit(f"range() of more than {MAX_RANGE} items")
    return numbers


def _dict(**items: object) -> dict[str, object]:
    return items


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^-a-zA-Z%]", pattern):
        raise SecurityError("strftime_now() takes a plain pattern of at most 200 characters")
    return datetime.now().strftime(pattern)
