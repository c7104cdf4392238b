"""Which parameters make a unit: by hand for models that people write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from instep.shard.partition import partition


def named(module: nn.Module, units: list[nn.Module] | None = None) -> dict[str, list[str]]:
    return {members.name: list(members.names) for members in partition(module, units)}


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2, bias=False)
        self.encoder = nn.Identity()
        self.encoder.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)) for _ in range(2)
        )
        self.tail = nn.Sequential(nn.ReLU(), nn.Linear(2, 2, bias=False))


def test_entries_of_the_outermost_lists_are_units_and_the_rest_is_the_root() -> None:
    assert named(Mixed()) == {
        "": ["stem.weight"],
        "encoder.layers.0": ["encoder.layers.0.0.weight", "encoder.layers.0.1.weight"],
        "encoder.layers.1": ["encoder.layers.1.0.weight", "encoder.layers.1.1.weight"],
        "tail.1": ["tail.1.weight"],
    }


def test_what_two_units_use_is_the_roots() -> None:
    module = Mixed()
    module.encoder.layers[1][0].weight = module.encoder.layers[0][0].weight
    assert named(module)[""] == ["stem.weight", "encoder.layers.0.0.weight"]
    assert named(module)["encoder.layers.1"] == ["encoder.layers.1.1.weight"]


def test_units_that_are_given_replace_the_lists_and_the_innermost_one_counts() -> None:
    module = Mixed()
    assert named(module, [module.encoder, module.encoder.layers[1]]) == {
        "": ["stem.weight", "tail.1.weight"],
        "encoder": ["encoder.layers.0.0.weight", "encoder.layers.0.1.weight"],
        "encoder.layers.1": ["encoder.layers.1.0.weight", "encoder.layers.1.1.weight"],
    }
    assert named(module, []) == {"": [name for name, _ in module.named_parameters()]}


def test_a_unit_that_is_no_part_of_the_module_is_refused() -> None:
    module = Mixed()
    with pytest.raises(ValueError, match=r"units\[1\], a Linear: expected a submodule"):
        partition(module, [module.stem, nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"units\[0\], a ModuleList: expected .* with a forward"):
        partition(module, [module.encoder.layers])


def test_kinds_are_apart_and_whole_numbers_are_nobodys() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(2))
    module.b = nn.Parameter(torch.zeros(2), requires_grad=False)
    module.c = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    module.d = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    module.e = nn.Parameter(torch.zeros(2))
    assert [unit.names for unit in partition(module)] == [("a", "e"), ("b",), ("c",)]


def test_what_is_never_called_has_its_parameters_used_by_the_module_around_it() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lists = nn.ModuleList(nn.ParameterList([torch.ones(2)]) for _ in range(2))
            self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False), Inner()])

        def forward(self) -> None: ...

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ParameterDict({"x": torch.ones(2)})

        def forward(self) -> None: ...

    module = Around()
    assert named(module) == {
        "": ["lists.0.0", "lists.1.0"],
        "layers.0": ["layers.0.weight"],
        "layers.1": ["layers.1.own.x"],
    }
