"""Docstrings of the public names: arguments, results and errors are all there, and the examples run."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import instep
from instep.checkpoint.shorthand import Resumed
from instep.expert import StepLoads
from instep.mesh.mesh import Mesh
from instep.run.loop import RunStep
from instep.shard.fully import FullySharded
from instep.step.micro_batches import MicroBatch
from instep.tensor.layers import TensorLayer
from instep.timeline.trace import TraceSession
from instep.verify.gradient_report import Report
from tests.test_docs import program
from tests.test_package import OBJECTS

# What users are given, and do not make.
GIVEN = {
    "init": Mesh,
    "micro_batches": MicroBatch,
    "load": Resumed,
    "trace": TraceSession,
    "fully_shard": FullySharded,
    "verify": Report,
    "steps": RunStep,
    "balanced": StepLoads,
}
# One does nothing, and warns so; the others are for ``micro_batches``.
WITHOUT = {"DataParallel.join", "Loader.read", "Loader.advance"}
CHECKED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)


class Named(NamedTuple):
    """A public name: what it is, and the class that it belongs to, if any."""

    public: Any
    owner: type | None = None

    @property
    def text(self) -> str:
        return inspect.getdoc(self.public) or ""

    @property
    def is_error(self) -> bool:
        return isinstance(self.public, type) and issubclass(self.public, BaseException)

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What users pass: nothing for what they are given; the fields of a dataclass are attributes."""
        is_given = self.public in GIVEN.values() or dataclasses.is_dataclass(self.public)
        if not callable(self.public) or self.is_error or is_given:
            return {}
        found = inspect.signature(self.public).parameters
        return {name: p for name, p in found.items() if name != "self"}


def public_names() -> Iterator[tuple[str, Named]]:
    """By their path in help texts: functions and classes, and the methods and properties of classes."""
    for name in OBJECTS:
        public = getattr(instep, name)
        yield name, Named(public)
        if isinstance(public, ModuleType):
            kinds = {kind: getattr(public, kind) for kind in public.__all__}
            yield from ((f"{name}.{kind}", Named(x)) for kind, x in kinds.items() if is_made_by_users(x))
        else:
            yield from members(name, public if isinstance(public, type) else type(public))
    for kind in GIVEN.values():
        yield kind.__name__, Named(kind)
        yield from members(kind.__name__, kind)


def is_made_by_users(x: Any) -> bool:
    """Not a constant, nor a layer that ``instep.tensor.shard`` puts in the place of another one."""
    return inspect.isfunction(x) or (inspect.isclass(x) and not issubclass(x, TensorLayer))


def members(name: str, kind: type) -> Iterator[tuple[str, Named]]:
    """Those that instep has made; what torch's classes have and describe counts where it takes arguments."""
    theirs = {key for base in kind.__mro__ if base.__module__.startswith("torch") for key in vars(base)}
    for base in reversed(kind.__mro__):
        for key, member in vars(base).items() if base.__module__.startswith("instep") else ():
            is_code = callable(member) or isinstance(member, property | cached_property)
            told = key not in theirs or "Args:" in (inspect.getdoc(member) or "")
            if is_code and told and not key.startswith("_"):
                yield f"{name}.{key}", Named(member, base)


NAMES = dict(public_names())


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring, by their headings; what comes before is called ""."""
    parts = re.split(r"^(Args|Attributes|Returns|Yields|Raises|Example):$", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(text: str, section: str) -> set[str]:
    """The names that the lines of a section begin with."""
    return {name for names in ENTRY.findall(sections(text).get(section, "")) for name in names.split(", ")}


def fields_of(public: Any) -> set[str]:
    """What a class shows that is no method: of an error what it is made with, of a dataclass its fields."""
    if dataclasses.is_dataclass(public):
        return {field.name for field in dataclasses.fields(public)}
    is_error = Named(public).is_error and "__init__" in vars(public)
    return set(inspect.signature(public).parameters) - {"message"} if is_error else set()


def raised(public: Any) -> set[str]:
    """The classes of errors that stand in ``raise`` statements of its own body."""
    code = vars(public).get("__init__") if isinstance(public, type) else public
    if not inspect.isfunction(code) or dataclasses.is_dataclass(public):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(code))))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    return set(filter(is_name_of_error, names))


def is_name_of_error(name: str) -> bool:
    return Named(getattr(instep.errors, name, getattr(builtins, name, None))).is_error


def test_arguments_are_all_told_and_no_others():
    for name, named in NAMES.items():
        told, accepted = entries(named.text, "Args"), named.parameters
        assert {key for key, p in accepted.items() if p.kind not in VARIADIC} <= told <= accepted.keys(), name
        assert fields_of(named.public) <= entries(named.text, "Attributes"), name


def test_errors_are_told_by_their_names():
    for name, named in NAMES.items():
        told = entries(named.text, "Raises")
        assert raised(named.public) <= told, name
        assert all(map(is_name_of_error, told)), name
        if "Collective" in named.text and not named.is_error:
            assert "PeerLost" in told, f"{name}: what is collective may lose a rank"


def test_what_is_returned_is_told():
    for name, named in NAMES.items():
        if inspect.isfunction(named.public) and named.parameters:
            returns = inspect.signature(named.public).return_annotation
            is_told = {"Returns", "Yields"} & sections(named.text).keys()
            assert is_told or returns in ("None", "NoReturn", "Iterator[None]"), name


def examples(of: Any) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(of) or "")


def test_every_name_is_in_an_example():
    """Its own, or one of its class."""
    for name, named in NAMES.items():
        if named.owner is None:
            assert examples(named.public) or named.is_error, name
        elif name not in WITHOUT:
            shown = [x.source for of in (named.owner, *vars(named.owner).values()) for x in examples(of)]
            assert re.search(rf"\.{name.split('.')[-1]}\b", "".join(shown)), name


@pytest.mark.parametrize("first", sorted({name.split(".")[0] for name in NAMES}))
def test_the_examples_run(first, tmp_path, monkeypatch):
    """As programs of one rank; that of a method after that of its class, which a reader has seen by then."""
    for name, named in NAMES.items():
        if name.split(".")[0] == first and (own := examples(named.public)):
            directory = tmp_path / name
            directory.mkdir()
            monkeypatch.chdir(directory)
            before = [] if named.owner is None else examples(named.owner)
            run([*before, *own], name)
            instep.get.register_mesh(None)


def run(found: list[doctest.Example], name: str) -> None:
    test = doctest.DocTest(found, program() | {"instep": instep}, name, None, 0, None)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=CHECKED)
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)
