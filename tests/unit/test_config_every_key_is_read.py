"""No key of the experiment file is silently ignored.

The schema is walked, and for each key some line of `headway/` or `services/` must read that very field: attribute
accesses are resolved through annotations and assignments (`def f(config: ActorConfig)`, `self._config = config.actor`),
so that reading `saver.keep_last` does not excuse `recover.keep_last`. A key whose whole effect is to be compared at
load is listed as such, and must be read by the checks; one that has a single possible value has its effect in refusing
all others. A key without any effect must be marked, or stand in `UNREAD`: both are told at load. `UNREAD` is exact.
"""

import ast
import inspect
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway import config as config_package
from headway.config import ExperimentConfig
from headway.config.engines import EngineFlags
from headway.config.keys import walk
from headway.config.section import NoMeaning, Section, section_class
from headway.config.unread import UNREAD

ROOT = Path(config_package.__file__).parents[2]
CHECKS = ROOT / "headway/config/checks.py"
DERIVING = [ROOT / "headway/config" / name for name in ("experiment.py", "actor.py", "observe.py", "cluster.py")]
"""Modules of the package that turn keys into what others read: paths, the allocation, secrets."""

ONLY_COMPARED = {
    "scheduler": "only kinds that exist are accepted",
    "cluster.n_nodes": "bounds the allocation",
    "cluster.n_gpus_per_node": "bounds the allocation",
    "actor.reward_norm.group_size": "must be gconfig.n_samples; groups are found by id",
    "scheduler.type": "only kinds that exist are accepted; the processes are placed by whoever starts them",
    "actor.adv_norm.group_size": "must be gconfig.n_samples; groups are found by id",
    "ref.scheduling_strategy": "only colocation with the actor is accepted",
    **{
        f"ref.scheduling_spec{name}": "must be the actor's: the reference lives in its processes"
        for name in ("", ".0.cpu", ".0.gpu", ".0.mem", ".0.image")
    },
    "ref.backend": "must be actor.backend",
    **{f"{role}.scheduling_strategy.target": "only the partner is accepted" for role in ("rollout", "actor", "ref")},
    **{
        f"{section}.{name}": "must repeat the experiment's own"
        for section in ("rollout", "actor", "ref", "saver", "recover", "evaluator", "stats_logger", "perf_tracer")
        for name in ("experiment_name", "trial_name")
    },
}

SECTIONS = {cls.__name__: cls for cls in [ExperimentConfig, *(section for _, section, _ in walk(ExperimentConfig))]}
for _base in list(SECTIONS.values()):
    SECTIONS |= {cls.__name__: cls for cls in _base.__mro__ if issubclass(cls, Section)}

ROUNDS = 3
Kind = str | None
"""Name of a class: a section, or one of ours that may hold sections."""


class Classes:
    """What the attributes and methods of every class give, by the names of classes, as far as annotations say."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self._classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self._names = {*SECTIONS, *(node.name for node in self._classes)}
        self._members: dict[str, dict[str, str]] = {}
        for node in self._classes:
            self._members.setdefault(node.name, {}).update(self._members_of(node))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.returns = {f.name: kind for f in functions if (kind := self.named(f.returns)) is not None}

    def named(self, annotation: ast.expr | None) -> Kind:
        """The class that an annotation names, through `| None`, `list[...]` and quotes; sections first."""
        nodes = list(ast.walk(annotation)) if annotation is not None else []
        names = [n.attr if isinstance(n, ast.Attribute) else getattr(n, "id", getattr(n, "value", None)) for n in nodes]
        known = [name for name in names if isinstance(name, str) and name in self._names]
        return next((name for name in known if name in SECTIONS), next(iter(known), None))

    def member(self, kind: str, name: str) -> Kind:
        """The class of an attribute, property or method's result."""
        if (section := SECTIONS.get(kind)) is not None:
            field = section.model_fields.get(name)
            inner = section_class(field.annotation) if field is not None else _given_by(section, name)
            return inner.__name__ if inner is not None else self._members.get(kind, {}).get(name)
        return self._members.get(kind, {}).get(name)

    def _members_of(self, node: ast.ClassDef) -> dict[str, str]:
        members: dict[str, Kind] = {}
        for part in ast.walk(node):
            if isinstance(part, ast.AnnAssign):
                members[ast.unparse(part.target).removeprefix("self.")] = self.named(part.annotation)
            elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                members[part.name] = self.named(part.returns)
        return {name: kind for name, kind in members.items() if kind is not None}

    def learn(self, kind: str, name: str, member: str) -> None:
        """An attribute is set to something whose class is known."""
        self._members.setdefault(kind, {}).setdefault(name, member)


def _given_by(section: type[Section], name: str) -> type[Section] | None:
    """The section that a property or method of a section gives."""
    member = inspect.getattr_static(section, name, None)
    function = getattr(member, "fget", None) or getattr(member, "func", None) or member
    return section_class(typing.get_type_hints(function).get("return")) if inspect.isfunction(function) else None


class Scan(ast.NodeVisitor):
    """Collects which fields are read."""

    def __init__(self, classes: Classes) -> None:
        self.reads: set[tuple[type[Section], str]] = set()
        self.whole: set[type[Section]] = set()
        self._classes = classes
        self._scopes: list[dict[str, str]] = [{}]

    def kind(self, node: ast.expr | None) -> Kind:
        """The class of an expression, or of its items; notes the fields that it reads on the way."""
        match node:
            case ast.Name(id=name):
                return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)
            case ast.Attribute(value=value, attr=attr):
                return self._attribute(self.kind(value), attr)
            case ast.Call(func=ast.Attribute(value=value, attr="words")):
                self.whole |= {SECTIONS[kind] for kind in [self.kind(value)] if kind in SECTIONS}
                return None
            case ast.Call(func=ast.Attribute(value=value, attr="model_copy" | "new")):
                return self.kind(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if (kind := self.kind(value)) is not None:
                return self._classes.member(kind, name)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                return self._classes.returns.get(name)
            case ast.BoolOp(values=values) | ast.List(elts=values) | ast.Tuple(elts=values):
                return next((kind for kind in map(self.kind, values) if kind is not None), None)
            case ast.IfExp(body=body, orelse=orelse):
                return self.kind(body) or self.kind(orelse)
            case (
                ast.Subscript(value=value)
                | ast.Starred(value=value)
                | ast.NamedExpr(value=value)
                | ast.Await(value=value)
            ):
                return self.kind(value)
        return None

    def _attribute(self, kind: Kind, attr: str) -> Kind:
        if kind in SECTIONS and attr in SECTIONS[kind].model_fields:
            self.reads.add((SECTIONS[kind], attr))
        return self._classes.member(kind, attr) if kind is not None else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.kind(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.kind(node)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within({"self": node.name, "cls": node.name}, node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = {a.arg: self._classes.named(a.annotation) for a in arguments}
        self._within({name: kind for name, kind in named.items() if kind is not None}, node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def _within(self, scope: dict[str, str], node: ast.AST) -> None:
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    self._bind(one, value)
            else:
                self._bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and (kind := self._classes.named(node.annotation)) is not None:
            self._scopes[-1][node.target.id] = kind
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp) -> None:
        for generator in node.generators:
            self._bind(generator.target, generator.iter)
        self.generic_visit(node)

    visit_ListComp = visit_DictComp = visit_SetComp = visit_GeneratorExp

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if (kind := self.kind(value)) is None:
            return
        if isinstance(target, ast.Name):
            self._scopes[-1][target.id] = kind
        elif isinstance(target, ast.Attribute) and (owner := self.kind(target.value)) is not None:
            self._classes.learn(owner, target.attr, kind)


def modules() -> Iterator[Path]:
    for folder in ("headway", "services"):
        yield from (
            p for p in (ROOT / folder).rglob("*.py") if "headway/config/" not in str(p) and "/v1/" not in str(p)
        )
    yield from DERIVING


def scan(sources: Sequence[str]) -> Scan:
    """Everything that the sources read. What attributes hold is learned on the way: hence several rounds."""
    trees = [ast.parse(source) for source in sources]
    found = Scan(Classes(trees))
    for tree in trees * ROUNDS:
        found.visit(tree)
    return found


def is_read(found: Scan, section: type[Section], name: str) -> bool:
    """Whether a field is read as one of this section: by its own class, or one that it inherits the field from."""
    if any(issubclass(section, whole) for whole in found.whole):
        return True
    return any(name == read and issubclass(section, kind) for kind, read in found.reads)


def has_one_value(annotation: Any) -> bool:
    """Whether the type leaves no choice."""
    return annotation is type(None) or (
        typing.get_origin(annotation) is typing.Literal and len(typing.get_args(annotation)) == 1
    )


@pytest.fixture(scope="module")
def found() -> Scan:
    return scan([path.read_text(encoding="utf-8") for path in modules()])


def test_every_key_is_read_or_told_to_have_no_effect(found: Scan) -> None:
    unread = [
        key
        for key, section, field in walk(ExperimentConfig)
        if not any(isinstance(mark, NoMeaning) for mark in field.metadata)
        and not has_one_value(field.annotation)
        and not is_read(found, section, key.rpartition(".")[2])
        and key not in ONLY_COMPARED
    ]
    assert set(unread) == UNREAD


def test_what_is_only_compared_is_read_by_the_checks() -> None:
    text = CHECKS.read_text(encoding="utf-8")
    assert [key for key in ONLY_COMPARED if not any(name in text for name in key.split(".")[1:] or [key])] == []


def test_flags_of_engines_are_passed_on_whole(found: Scan) -> None:
    assert {cls for cls in SECTIONS.values() if issubclass(cls, EngineFlags)} - {EngineFlags} <= found.whole


def test_reading_a_key_of_one_section_does_not_excuse_the_same_name_in_another() -> None:
    source = "class Loop:\n    config: ExperimentConfig\n    def f(self):\n        return self.config.saver.keep_last"
    only = scan([source])
    assert is_read(only, SECTIONS["SaverConfig"], "keep_last")
    assert not is_read(only, SECTIONS["RecoverConfig"], "keep_last")
