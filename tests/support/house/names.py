"""Names of variables that are participles or pronouns: they do not say what they hold.

A binding is a name in a scope, however often it is assigned there: a variable of a module, class,
function, lambda or comprehension, a parameter, or a field, by `self` or in the class's body.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from house.sources import Place, tree_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRONOUNS = _words("""
    all another any anybody anyone anything both each either everybody everyone everything few
    his it many mine neither nobody none nothing one other others ours several some somebody
    someone something such that theirs them these they this those what which who whom whose
    yours
""")
IRREGULAR = _words("""
    begun born bought broken brought built came caught chosen drawn driven eaten fallen felt
    flown forbidden forgotten found frozen given got grew grown had heard held kept known laid
    led left lent lost made meant met paid ran risen said seen sent shown sought spent spoilt
    spoken spread stolen stood struck sworn taken taught thrown told took torn understood went
    woken won worn written
""")
# The field's nouns, by that ending, and names that a protocol or a library prescribes.
NOUNS = _words("""
    batching binding building ceiling created decoding done embedding encoding ending expected feed
    finding heading keyring logging mapping meaning need packing padding parsing pending ping
    pooling reasoning red ring routing running sampling scaling scheduling scoring seed serving
    setting speed spelling streaming string thing thinking timing tracing training waiting warning
""")
STRONG = _words("""
    asked each found given known made said shown some told
""")
STATE = re.compile(r"(is|are|was|were|has|have|had|may|can)_")

_SCOPES = (
    ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
)  # fmt: skip


@dataclass(slots=True)
class Binding:
    line: int
    is_bool: bool = False


Names = dict[str, Binding]


def unclear(paths: Iterable[Path]) -> tuple[list[Place], int]:
    """Return the bindings whose names do not say what they hold, and the number of all bindings."""
    places, num_bindings = list[Place](), 0
    for path in paths:
        for names in scopes(tree_of(path)):
            num_bindings += len(names)
            places += [
                Place(path, binding.line, name)
                for name, binding in names.items()
                if is_unclear(name, binding.is_bool)
            ]
    return places, num_bindings


def is_unclear(name: str, is_bool: bool = False) -> bool:
    """Return whether the name is a pronoun or a participle. That of a boolean is a state."""
    if not (name.islower() or name.isupper()):
        return False  # of a type
    if name.startswith("__") and name.endswith("__"):
        return False  # prescribed by Python
    word = name.strip("_").lower()
    if "_" in word:
        return word.rpartition("_")[2] in STRONG and not STATE.match(word)
    if word in PRONOUNS or word.removeprefix("un") in IRREGULAR:
        return True
    return bool(re.fullmatch(r"[a-z]+(ed|ing)", word)) and word not in NOUNS and not is_bool


def scopes(tree: ast.Module) -> list[Names]:
    """Return the names that each scope of a file binds."""
    names = list[Names]([{}])
    _bind_below(tree, names[0], names[0], names)
    return names


def _bind_below(node: ast.AST, scope: Names, of_class: Names, names: list[Names]) -> None:
    for child in ast.iter_child_nodes(node):
        inner, fields = scope, of_class
        if isinstance(child, _SCOPES):
            inner = {}
            names.append(inner)
            fields = inner if isinstance(child, ast.ClassDef) else of_class
        _bind(child, inner, fields)
        _bind_below(child, inner, fields, names)


def _bind(node: ast.AST, scope: Names, of_class: Names) -> None:
    """Note the name that this node itself binds; in an assignment, whether it is a boolean."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                _bind_target(target, scope, of_class, _is_bool(None, value))
        case ast.AnnAssign(target=target, annotation=annotation, value=value):
            _bind_target(target, scope, of_class, _is_bool(annotation, value))
        case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            _bind_target(node, scope, of_class, is_bool=False)
        case ast.arg(arg=name, annotation=annotation) if name not in ("self", "cls"):
            _note(scope, name, node.lineno, _is_bool(annotation, None))
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            _note(scope, name, node.lineno, is_bool=False)
        case ast.MatchStar(name=str(name)):
            _note(scope, name, node.lineno, is_bool=False)


def _bind_target(target: ast.expr, scope: Names, of_class: Names, is_bool: bool) -> None:
    match target:
        case ast.Name(name):
            _note(scope, name, target.lineno, is_bool)
        case ast.Attribute(ast.Name("self"), name):
            _note(of_class, name, target.lineno, is_bool)


def _note(names: Names, name: str, line: int, is_bool: bool) -> None:
    if name != "_":
        binding = names.setdefault(name, Binding(line))
        binding.is_bool |= is_bool


def _is_bool(annotation: ast.expr | None, value: ast.expr | None) -> bool:
    match annotation or value:
        case ast.Name("bool") | ast.Compare() | ast.UnaryOp(ast.Not()) | ast.Constant(bool()):
            return True
    return False
