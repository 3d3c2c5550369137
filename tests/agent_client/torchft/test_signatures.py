"""Every name, argument and property of torchft's native module, as its own _torchft.pyi and its binary tell them."""

import ast
import dataclasses
import inspect
import json
import operator
from pathlib import Path
from typing import Any

import pytest

import agent_client.torchft as ours
from tests.agent_client.torchft.scripts import NATIVE_NAMES
from tests.processes import run_cli
from tests.torchft import native
from tests.torchft.stock import require

# In a process of its own: the binary must not take the place of ours in this one.
PRINT_BINARY = """
import inspect, json
from tests.torchft.native import load

def parameters(thing):
    return [[p.name, p.default is p.empty] for p in inspect.signature(thing).parameters.values() if p.name != "self"]

kinds = {name: kind for name, kind in vars(load()).items() if isinstance(kind, type)}
found = {name: parameters(kind) for name, kind in kinds.items() if kind.__text_signature__}
for name, kind in kinds.items():
    for method, function in vars(kind).items():
        if getattr(function, "__text_signature__", None) and not method.startswith("__"):
            found[f"{name}.{method}"] = parameters(function)
print(json.dumps(found))
"""


def stubs() -> dict[str, ast.ClassDef]:
    require()
    where = native.find()
    assert where is not None
    tree = ast.parse((Path(where[0]) / "_torchft.pyi").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def methods(stub: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in stub.body if isinstance(node, ast.FunctionDef)]


def fields(stub: ast.ClassDef) -> list[str]:
    return [
        node.target.id for node in stub.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def test_the_names_are_those_of_the_stub_file() -> None:
    assert set(NATIVE_NAMES) == set(stubs())


@pytest.mark.parametrize("name", NATIVE_NAMES)
def test_methods_take_the_arguments_of_the_stub_file_and_its_properties_are_there(name: str) -> None:
    stub, kind = stubs()[name], getattr(ours, name)
    for method in methods(stub):
        parameters = inspect.signature(getattr(kind, method.name)).parameters
        assert set(parameters) == {argument.arg for argument in method.args.args}, method.name
    if dataclasses.is_dataclass(kind):
        assert [field.name for field in dataclasses.fields(kind)] == fields(stub)
    else:
        assert set(fields(stub)) <= set(inspect.signature(kind).parameters)


def parameters(thing: Any) -> list[list[Any]]:
    """Name, and whether it must be given."""
    found = inspect.signature(thing).parameters.values()
    return [[p.name, p.default is p.empty] for p in found if p.name != "self"]


def test_arguments_have_the_order_and_the_defaults_of_the_binary() -> None:
    """The stub file differs from it in both, for ManagerClient._quorum."""
    require()
    done = run_cli(PRINT_BINARY)
    assert done.returncode == 0, done.stderr
    binary = json.loads(done.stdout)
    assert len(binary) == 14
    del binary["QuorumResult"]  # takes none; ours takes its fields
    assert binary == {name: parameters(operator.attrgetter(name)(ours)) for name in binary}


def test_a_result_begins_with_the_values_of_the_binary() -> None:
    require()
    done = run_cli(
        "import json; from tests.torchft.native import load; one = load().QuorumResult(); "
        "print(json.dumps({name: getattr(one, name) for name in dir(one) if not name.startswith('_')}))"
    )
    assert done.returncode == 0, done.stderr
    # The stub file has commit_failures, the binary does not.
    assert json.loads(done.stdout) | {"commit_failures": 0} == dataclasses.asdict(ours.QuorumResult())


def test_every_class_says_its_arguments() -> None:
    """torchft's own test of its documentation (coordination_test.py)."""
    for name in NATIVE_NAMES:
        assert "Args:" in (getattr(ours, name).__doc__ or ""), name
