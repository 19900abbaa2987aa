"""YAML as OmegaConf and Hydra read it (1e-4 is a number, no dates), with the line of each key and no silent twins."""

import math
import re
from functools import cache
from typing import Any, Protocol

from distill.config.reader import Document, ParseError, Trail

_MAX_DEPTH, _MAX_NODES = 64, 100_000
_TAG = "tag:yaml.org,2002:"
# YAML 1.1 wants a point in a number with an exponent; sexagesimal numbers (1:30) are nobody's wish.
_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_INT = re.compile(r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0o[0-7_]+)")
_OURS = ("bool", "null", "merge")


class YamlError(ParseError):
    """Text that isn't YAML, or holds more than keys, values and lists."""


def read_yaml(text: str) -> Document:
    """Read one YAML document. Anchors and ``<<`` work, a key given twice and every tag are refused: YamlError."""
    import yaml

    try:
        loader = _loader_class()(text)
        node = loader.get_single_node()
        walk = _Walk(loader)
        return Document({} if node is None else walk.value(node, ()), walk.lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.line + 1}:{mark.column + 1}" if mark else "1"
        raise YamlError(where, _words(error.problem or error.context or "is not YAML")) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(str(line), f"holds the character U+{error.character:04X}, which YAML doesn't allow") from None
    except RecursionError:
        raise YamlError("1", "nested too deeply") from None


class _Loader(Protocol):
    def construct_object(self, node: Any) -> Any: ...
    def flatten_mapping(self, node: Any) -> None: ...


@cache
def _loader_class() -> Any:
    """PyYAML's safe loader with our numbers and without dates. Made once, when the first YAML is read."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own form
            first: [(tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) in _OURS]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver(f"{_TAG}float", re.compile(f"^(?:{_FLOAT.pattern})$"), list("-+0123456789."))
    Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"^(?:{_INT.pattern})$"), list("-+0123456789"))
    return Loader


class _Walk:
    """Nodes to values; ``lines`` as in Document."""

    def __init__(self, loader: _Loader) -> None:
        self._loader = loader
        self._nodes = 0
        self.lines: dict[Trail, int] = {}

    def value(self, node: Any, trail: Trail) -> Any:
        self._nodes += 1
        if len(trail) > _MAX_DEPTH or self._nodes > _MAX_NODES:  # an anchor inside itself, or one that multiplies
            raise YamlError(str(node.start_mark.line + 1), "nested too deeply, or too large")
        if node.id != "scalar" and node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            raise YamlError(str(node.start_mark.line + 1), f"{_name(trail)}the tag {node.tag} is not read")
        if node.id == "mapping":
            return self._mapping(node, trail)
        if node.id == "sequence":
            return [self._item(item, (*trail, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, trail)

    def _item(self, node: Any, trail: Trail) -> Any:
        self.lines[trail] = node.start_mark.line + 1
        return self.value(node, trail)

    def _mapping(self, node: Any, trail: Trail) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.id != "scalar":
                raise YamlError(str(line), "a key must be a word")
            if key.value in seen:
                raise YamlError(str(line), f"{key.value}: given twice, first on line {seen[key.value]}")
            seen[key.value] = line
        self._loader.flatten_mapping(node)
        members: dict[str, Any] = {}
        for key, item in node.value:  # what << brings comes first, and what is said here counts more
            self.lines[(*trail, key.value)] = key.start_mark.line + 1
            members[key.value] = self.value(item, (*trail, key.value))
        return members

    def _scalar(self, node: Any, trail: Trail) -> Any:
        line = node.start_mark.line + 1
        name = _name(trail)
        kind = node.tag.removeprefix(_TAG)
        if kind not in ("str", "int", "float", "bool", "null"):
            raise YamlError(str(line), f"{name}the tag {node.tag} is not read")
        if kind == "int" and not _INT.fullmatch(node.value):
            raise YamlError(str(line), f"{name}{node.value!a} is not a whole number")
        if kind == "int":
            digits = node.value.replace("_", "")
            if len(digits) > 4000:
                raise YamlError(str(line), f"{name}a number with too many digits")
            return int(digits, 0)
        value = self._loader.construct_object(node)
        if isinstance(value, float) and not math.isfinite(value):
            raise YamlError(str(line), f"{name}{node.value[:20]} is not a finite number")
        return value


def _name(trail: Trail) -> str:
    """The innermost key of a trail, as the front of a message."""
    return next((f"{part}: " for part in reversed(trail) if isinstance(part, str)), "")


def _words(problem: str) -> str:
    """PyYAML's words for the commonest slips, told so that they can be mended."""
    if "\\t" in problem:
        return "a tab where only spaces may indent"
    if "mapping values are not allowed" in problem:
        return "a colon where no key can be: is the line indented as its neighbours, or the text in need of quotes?"
    if "unknown escape" in problem:
        return f"{problem}: write backslashes in single quotes ('C:\\data') or forward slashes (\"C:/data\")"
    return " ".join(problem.split())
