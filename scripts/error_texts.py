"""Every text with which the code reports an error; ``python -m scripts.error_texts`` lists them.

Found in the syntax tree, so that none can be forgotten: the message of every exception that is made
of our classes or of a built-in one, every error in a log, and every reason that a check gives. What
varies becomes ``…``. ``docs/troubleshooting.md`` has an entry for each; a test holds that.
"""

from __future__ import annotations

import ast
import builtins
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapter_bucket", "trl_async_bucket", "vllm_bucket_lora", "proxy")
GAP = "…"
"""Stands for what varies."""

_INTERNAL = {"AssertionError", "NotImplementedError", "AttributeError", "KeyError", "SystemExit"}
"""Not for users: they show a fault of the code."""

_REASONS = re.compile(
    r"fault|mismatch|difference|refus|consequence|too_few|admit|on_replica|_say|wait_ready"
)
"""Names of functions that put a reason into words which end up in a status, a log or an error."""

_PERCENT = re.compile(r"%[-+ #0]*[\d.]*[a-zA-Z]")


@dataclass(frozen=True, order=True)
class ErrorText:
    """One text and where it is made."""

    template: str
    place: str


def error_texts() -> list[ErrorText]:
    """All texts of the packages, sorted, without those that are nothing but a value."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    exceptions = _exception_names(trees.values())
    modules = {_module(path): _constants(tree) for path, tree in trees.items()}
    found = {
        ErrorText(template, f"{path}:{line}")
        for path, tree in trees.items()
        for template, line in texts_of(tree, exceptions, _imported(tree, modules))
        if sum(char in string.ascii_letters for char in template.replace(GAP, "")) >= MIN_LETTERS
    }
    return sorted(found)


def texts_of(
    tree: ast.Module, exceptions: set[str], constants: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, int]]:
    """The texts of one module, with their lines.

    Args:
        tree: The module.
        exceptions: Names of the classes whose arguments are texts.
        constants: Texts by the names under which the module may import them.
    """
    return _Reader(exceptions, {**constants, **_constants(tree)}).texts(tree)


MIN_LETTERS = 6
"""Letters of a template that are its own; with less, another text is shown inside this one."""


class _Reader:
    def __init__(self, exceptions: set[str], constants: dict[str, str]) -> None:
        self._exceptions = exceptions
        self._constants = constants

    def texts(self, tree: ast.Module) -> Iterator[tuple[str, int]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.FunctionDef) and _REASONS.search(node.name):
                yield from self._of_reasons(node)

    def _of_call(self, call: ast.Call) -> Iterator[tuple[str, int]]:
        name = _called(call.func)
        if name in self._exceptions:
            for argument in call.args:
                if text := self.template(argument):
                    yield text, call.lineno
        elif name in ("error", "exception", "critical") and isinstance(call.func, ast.Attribute):
            owner = _called(call.func.value)
            if owner in ("logger", "log") and call.args and (text := self.template(call.args[0])):
                yield _PERCENT.sub(GAP, text), call.lineno

    def _of_reasons(self, function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
        """Texts that a function returns, yields or appends; parts of other texts are not."""
        for node in ast.walk(function):
            values: list[ast.expr] = []
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                values = _alternatives(node.value)
            elif isinstance(node, ast.Call) and _called(node.func) == "append":
                values = [one for argument in node.args for one in _alternatives(argument)]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr):
                values = [node.value]
            for value in values:
                text = self.template(value)
                if text and " " in text.strip():
                    yield text, value.lineno

    def template(self, node: ast.expr) -> str:
        """The text of an expression, or nothing if it holds no text of its own."""
        return re.sub(f"{GAP}+", GAP, " ".join(self._raw(node).split()))

    def _raw(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(self._piece(value) for value in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return (self._raw(node.left) or GAP) + (self._raw(node.right) or GAP)
        if isinstance(node, ast.Name):
            return self._constants.get(node.id, "")
        return ""

    def _piece(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue):
            inner = node.value
            return self._constants.get(inner.id, GAP) if isinstance(inner, ast.Name) else GAP
        return self._raw(node)


def _exception_names(trees: Iterable[ast.Module]) -> set[str]:
    names = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, Exception) and name not in _INTERNAL
    }
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:  # until no class derives from a known one any more
        new = {
            node.name
            for node in classes
            if node.name not in names and any(_called(base) in names for base in node.bases)
        }
        if not new:
            return names
        names |= new


def _constants(tree: ast.Module) -> dict[str, str]:
    """Module-level names of a module that stand for a text."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _imported(tree: ast.Module, modules: Mapping[str, dict[str, str]]) -> dict[str, str]:
    """Texts of other modules, under the names by which this one knows them."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            theirs = modules.get(node.module or "", {})
            names = [alias for alias in node.names if alias.name in theirs]
            found |= {alias.asname or alias.name: theirs[alias.name] for alias in names}
    return found


def _module(path: str) -> str:
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return re.sub(r"^proxy\b", "bucket_lora_proxy", dotted)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The texts that an expression may be: both sides of a condition, all items of a list."""
    if isinstance(node, ast.IfExp):
        return [*_alternatives(node.body), *_alternatives(node.orelse)]
    if isinstance(node, ast.List | ast.Tuple):
        return [one for item in node.elts for one in _alternatives(item)]
    return [node]


def _called(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    for one in error_texts():
        print(f"{one.place}: {one.template}")
