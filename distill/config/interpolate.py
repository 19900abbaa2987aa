"""``${name}``, ``${oc.env:NAME}`` and ``${eval:"arithmetic"}`` in values, resolved by OmegaConf.

OmegaConf is loaded where a value has a reference, and not otherwise: it takes a tenth of a second.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from distill.config.keys import suggest
from distill.config.tree import Entry, Tree, nested
from distill.config.words import value_of_text
from distill.errors import InputError

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "min": min, "max": max, "round": round, "abs": abs, "len": len,
}  # fmt: skip
_MAX_EXPONENT, _MAX_EXPRESSION = 64, 500
_OPEN = "???"  # OmegaConf's and Hydra's word for a value that has to be given elsewhere


def resolve_references(tree: Tree) -> list[Entry]:
    """The entries with every reference replaced by what it means. InputError names file, line and key."""
    if not any(_refers(entry.value) for entry in tree.entries.values()):
        return list(tree.entries.values())
    return list(_resolved(tree))


def evaluate_expression(text: str) -> Any:
    """The value of an arithmetic expression: numbers, texts, comparisons, and calls of a few functions.

    No attribute, no subscript, no other name. ValueError says what is wrong.
    """
    import simpleeval

    if len(text) > _MAX_EXPRESSION:
        raise ValueError(f"an expression of more than {_MAX_EXPRESSION} characters")
    operators = simpleeval.DEFAULT_OPERATORS | {ast.Pow: _power}
    evaluator = simpleeval.SimpleEval(functions=_FUNCTIONS, names={}, operators=operators)
    for node in (ast.Attribute, ast.Subscript):
        evaluator.nodes.pop(node, None)
    try:
        ast.parse(text.strip(), mode="eval")  # simpleeval itself lets statements pass, and ignores them
        return evaluator.eval(text)
    except (simpleeval.InvalidExpression, SyntaxError, ArithmeticError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot be computed: {' '.join(str(error).split())}") from None


def _power(base: Any, exponent: Any) -> Any:
    if not all(isinstance(number, int | float) for number in (base, exponent)) or abs(exponent) > _MAX_EXPONENT:
        raise ValueError(f"a power has to be of numbers, with an exponent up to {_MAX_EXPONENT}")
    return operator.pow(base, exponent)


def _refers(value: Any) -> bool:
    if isinstance(value, str):
        return "${" in value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_refers, items))


def _resolved(tree: Tree) -> Iterator[Entry]:
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    OmegaConf.register_resolver("eval", evaluate_expression, replace=True)
    for entry in tree.entries.values():
        try:
            OmegaConf.create({"value": entry.value})
        except GrammarParseError:
            problem = 'is no reference: write ${name}, or ${eval:"2 * ${name}"}, each brace closed'
            raise InputError(f"{entry.said}: {entry.value} {problem}") from None
    root = OmegaConf.create(nested(tree.entries.values()))
    for entry in tree.entries.values():
        if not _refers(entry.value):
            yield entry
            continue
        try:
            node: Any = root
            for part in entry.trail:
                node = node[part]
            value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            raise InputError(f"{entry.said}: {entry.value}: {_problem(error, tree)}") from None
        # What comes from the environment is text, as on the command line.
        if isinstance(value, str) and isinstance(entry.value, str):
            value = value_of_text(entry.trail, value, entry.said)
        yield replace(entry, value=value)


def _problem(error: Exception, tree: Tree) -> str:
    from omegaconf.errors import InterpolationKeyError, InterpolationToMissingValueError

    if isinstance(error, InterpolationToMissingValueError):
        return f"refers to a value that is left open ({_OPEN})"
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", _first(error)).strip("\"'")
    unknown = re.search(r"Interpolation key '([^']*)'", text)
    if isinstance(error, InterpolationKeyError) and unknown:
        names = [".".join(trail) for trail in tree.entries]
        return f"nothing is called {unknown[1]!r}{suggest(unknown[1], names)}"
    return text[:1].lower() + text[1:]


def _first(error: Exception) -> str:
    """The first line of a message: what follows tells of OmegaConf's own objects."""
    return (str(error).splitlines() or [""])[0].strip()
