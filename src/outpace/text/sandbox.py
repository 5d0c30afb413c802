"""A Jinja environment in which a model's chat template can do no harm: no access, no endless loop, no memory bomb.

Neighbour: template.py renders with it. Templates come with model files, so they are hostile until proven otherwise.
On top of Jinja's immutable sandbox every loop step and call is counted and timed, and every text or list that a
template builds or writes is bounded, with all that lies inside a list: a defence in depth, not a proof. The conventions
are those that templates on the Hugging Face Hub rely on (transformers documentation, "Writing a chat template").
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_STEPS = 1_000_000  # loop steps of one rendering: far more than a conversation that fits a context needs
STEPS_OF_CALL = 10  # a call counts for this many, which is about what it costs
MAX_SIZE = 16 << 20  # characters of a text, or of all that is written; entries of a list
MAX_WIDTH = 1000  # of padding
MAX_SECONDS = 5.0  # of processor time: a rendering takes milliseconds
# Filters whose cost cannot be seen from their arguments, and that chat templates have no use for.
NO_FILTERS = (
    "batch",
    "center",
    "filesizeformat",
    "format",
    "pprint",
    "random",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)
PADDING_METHODS = ("center", "ljust", "rjust", "zfill")
NO_METHODS = ("expandtabs", "translate")


class RefusalError(Exception):
    """The template itself refused the conversation, through raise_exception."""


class LimitError(Exception):
    """A template took more steps or memory than a chat template can need."""


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what an assistant wrote, for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class Sandbox(ImmutableSandboxedEnvironment):
    """For one template: `reset` comes before each rendering, whose steps and written characters are counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._macro_data = 0
        self.reset()
        for name in NO_FILTERS:
            self.filters.pop(name, None)
        self.filters["tojson"] = _to_json
        self.filters["join"] = self._join
        self.filters["replace"] = self._replace
        self.filters["indent"] = self._indent
        self.filters["outpace_counted"] = self._counted
        self.filters["outpace_written"] = self._written
        self.filters["outpace_weighed"] = self._weighed
        self.filters["outpace_bounded"] = self._bounded
        self.globals.pop("lipsum", None)
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)

    def reset(self) -> None:
        self._steps = self._size = 0
        self._start = time.thread_time()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parses, then has loops counted, results of filters and `~` bounded, and what they are made of weighed."""
        tree = super()._parse(source, name, filename)
        every = [tree, *tree.find_all(nodes.Node)]
        for node in every:
            if isinstance(node, nodes.For):
                node.iter = _filtered(node.iter, "outpace_counted", nodes.Const(_own_text(node), lineno=node.lineno))
            elif isinstance(node, nodes.Macro):
                self._macro_data += _own_text(node)
        for node in every:
            for field, value in list(node.iter_fields()):
                if field == "filter":  # of a {% filter %} or {% set %} block: its innermost filter has no input
                    continue
                if isinstance(value, nodes.Node):
                    setattr(node, field, _checked(node, value))
                elif isinstance(value, list):
                    value[:] = [_checked(node, v) if isinstance(v, nodes.Node) else v for v in value]
        tree.set_environment(self)
        return tree

    # ------------------------------------------------------------------------------------------ what is counted

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step(self._macro_data if isinstance(obj, (Macro, LoopContext)) else 0, STEPS_OF_CALL)
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            if name in NO_METHODS:
                raise SecurityError(f"the text method {name} is not available")
            if name in PADDING_METHODS and any(isinstance(a, int) and a > MAX_WIDTH for a in args):
                raise LimitError(f"it pads a text to more than {MAX_WIDTH} characters")
            if name == "replace":
                return self._replace(owner, *args, **kwargs)
            if name == "join":
                return self._join(args[0] if args else (), owner)
        return self._bounded(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator_name: str, left: Any, right: Any) -> Any:
        if operator_name == "+":
            return self._bounded(operator.add(left, right))
        if operator_name == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
                    _limit(len(many) * times)
            return self._bounded(_small(operator.mul(left, right)))
        if operator_name == "%":
            if isinstance(left, (str, bytes)):
                raise SecurityError("formatting with % is not available")
            return operator.mod(left, right)
        if not all(isinstance(x, (int, float)) for x in (left, right)) or abs(right) > 64 or abs(left) > 2**32:
            raise LimitError("it raises to a power that is too high")
        return operator.pow(left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format, for fields without a width."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None
        text = str(value.__self__)

        def plain(*args: Any, **kwargs: Any) -> str:
            if ":" in text or "!" in text or value.__name__ != "format":
                raise SecurityError("the text method format is available for plain {} fields only")
            longest = max((len(str(weighed(a))) for a in (*args, *kwargs.values())), default=0)
            _limit(len(text) + text.count("{") * longest)
            return str(safe(*args, **kwargs))

        return plain

    def _step(self, data: int = 0, steps: int = 1) -> None:
        """One loop step or call, after which the template writes at most `data` characters of its own text."""
        self._steps += steps
        self._size += data
        _limit(self._size)
        if self._steps > MAX_STEPS:
            raise LimitError(f"it takes more than {MAX_STEPS} steps")
        self._watch()

    def _watch(self) -> None:
        if time.thread_time() - self._start > MAX_SECONDS:
            raise LimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def _weighed(self, value: Any) -> Any:
        self._watch()
        return weighed(value)

    def _bounded(self, value: Any) -> Any:
        return self._weighed(bounded(value))

    @pass_context  # keeps Jinja from calling it once, when it compiles, for constants
    def _counted(self, _context: Context, values: Any, data: int) -> Any:
        if isinstance(values, Undefined) or not isinstance(values, Iterable):
            return values  # Jinja's own error, or no loop step at all
        return self._walk(values, data)

    @pass_context
    def _written(self, _context: Context, value: Any) -> Any:
        if isinstance(value, Undefined):
            return value
        text = value if isinstance(value, str) else str(weighed(value))
        self._size += len(text)
        _limit(self._size)
        return text

    def _walk(self, values: Iterable[Any], data: int = 0) -> Iterator[Any]:
        for value in values:
            self._step(data)
            yield value

    # ----------------------------------------------------------------------------- texts whose size is foreseeable

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
        items: list[Any] = []
        size = 0
        for item in self._walk(value):
            items.append(item)
            if attribute is None:
                items[-1] = item if isinstance(item, str) else str(item)
                size += len(items[-1]) + len(d)
                _limit(size)
        if attribute is None:
            return str(d).join(items)
        picked = list(FILTERS["map"](self._context(), items, attribute=attribute))
        return self._join(picked, d)

    def _context(self) -> Context:
        return self.from_string("").new_context()

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(text), str(old), str(new)
        times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        _limit(len(text) + times * len(new))
        return str(text.replace(old, new, -1 if count is None else count))

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = str(text)
        size = len(width) if isinstance(width, str) else width
        _limit(len(text) + (text.count("\n") + 1) * size)
        return str(FILTERS["indent"](text, width, first, blank))


def bounded(value: Any) -> Any:
    """The value itself, unless it is a text or list longer than MAX_SIZE."""
    if isinstance(value, (str, bytes, list, tuple)):
        _limit(len(value))
    return value


def weighed(value: Any) -> Any:
    """The value itself, unless it holds more than MAX_STEPS values: lists in lists grow faster than they look."""
    waiting = [value]
    count = 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, (list, tuple, dict)):
            count += len(item)
            if count > MAX_STEPS:
                raise LimitError(f"it builds lists of more than {MAX_STEPS} entries")
            waiting += item.values() if isinstance(item, dict) else item
    return value


def _small(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 1024:
        raise LimitError("it computes a number that is too large")
    return value


def _limit(size: int) -> None:
    if size > MAX_SIZE:
        raise LimitError(f"it builds a text or list of more than {MAX_SIZE} entries")


def _checked(parent: nodes.Node, node: nodes.Node) -> nodes.Node:
    """The node, with the check around it that its kind and its parent's ask for."""
    if not isinstance(node, nodes.Expr) or isinstance(node, nodes.TemplateData) or _is_ours(node):
        return node
    if isinstance(node, (nodes.Concat, nodes.Filter)) and _has_input(node):
        node = _filtered(node, "outpace_bounded")
    elif isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        # [x, x] round by round is a small list that takes for ever to compare, hash or write.
        node = _filtered(node, "outpace_weighed")
    if isinstance(parent, nodes.Output):
        return _filtered(node, "outpace_written")
    if isinstance(parent, (nodes.Concat, nodes.Filter)) and not _is_ours(parent):
        return _filtered(node, "outpace_weighed")
    return node


def _own_text(node: nodes.Node) -> int:
    """How many characters of the template's own text the node writes at most each time it runs."""
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_ours(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Filter) and node.name.startswith("outpace_")


def _has_input(node: nodes.Expr | None) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node is not None


def _refuse(message: object) -> None:
    raise RefusalError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: characters as they are, no HTML escapes."""
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise LimitError(f"it indents by more than {MAX_WIDTH} characters")
    pair = None if separators is None else (separators[0], separators[1])
    text = json.dumps(weighed(value), ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
    _limit(len(text))
    return text
