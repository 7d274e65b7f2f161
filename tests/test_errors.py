"""Every exception of ours survives a copy and a pickle, with its class, its message and its facts."""

import copy
import importlib
import inspect
import pickle
import pkgutil
from typing import Any

import pytest

import backbone
import relay
from relay.wire.rebuild import Rebuildable


def _classes() -> list[type[Rebuildable]]:
    for package in (backbone, relay):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if module.name.endswith(("errors", "abi", "limits")):
                importlib.import_module(module.name)
    found: list[type[Rebuildable]] = []
    todo = [Rebuildable]
    while todo:
        kind = todo.pop()
        found.append(kind)
        todo += kind.__subclasses__()
    return sorted(set(found) - {Rebuildable}, key=lambda kind: (kind.__module__, kind.__name__))


def _argument(parameter: inspect.Parameter) -> Any:
    values = {"int": 3, "float": 1.5, "str": "a text", "bool": True, "int | None": 4}
    kind = parameter.annotation if isinstance(parameter.annotation, str) else None
    kind = kind or getattr(parameter.annotation, "__name__", str(parameter.annotation))
    return values.get(kind, values["int | None"] if "None" in str(parameter.annotation) else "a text")


def _made(kind: type[Rebuildable]) -> Rebuildable:
    if kind.__init__ in (Exception.__init__, Rebuildable.__init__):
        return kind("what happened")
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return kind(*(_argument(p) for p in parameters if p.kind is not p.VAR_KEYWORD))


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_an_exception_survives_copies(kind: type[Rebuildable]) -> None:
    exc = _made(kind)
    exc.add_note("seen in a test")
    for other in (copy.copy(exc), pickle.loads(pickle.dumps(exc))):
        assert type(other) is kind
        assert str(other) == str(exc) and other.args == exc.args
        assert vars(other) == vars(exc)


def test_the_trees_are_all_there() -> None:
    names = {kind.__name__ for kind in _classes()}
    assert {"EngineRefused", "FormulaUnsupported", "LayerFailed", "SliceTimeout", "FrameTooLarge"} <= names
