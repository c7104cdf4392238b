"""``torch.compile``, before and after wrapping, of the whole and of blocks: the bits are those without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

import instep
from instep.errors import CheckpointRejected
from instep.mesh.mesh import Mesh
from tests.checkpoint.states import all_bits
from tests.kinds import KINDS, LOOPS, WRAPPERS, Kind, close, on_every_kind
from tests.parity import filled, numbers, world_of_one

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # of what torch compiles
Compile = Callable[..., Any]


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def by_function(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, **options)


def by_method(model: nn.Module, **options: Any) -> nn.Module:
    getattr(model, "module", model).compile(**options)
    return model


def blocks_by_function(model: nn.Module, **options: Any) -> nn.Module:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)
    return model


def blocks_by_method(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(**options)
    return model


WAYS: tuple[Compile, ...] = (by_function, by_method, blocks_by_function, blocks_by_method)
PLACES = ("before", "after")


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def trained(
    mesh: Mesh, kind: Kind, before: Compile = as_it_is, after: Compile = as_it_is
) -> dict[str, Tensor]:
    """The weights after a declared step and an undeclared one, of batches that differ in size."""
    wrapped, optimizer = kind.make(before(filled(Blocks())), mesh)
    model = after(wrapped)
    for micro_batch in model.micro_batches(3):
        model(numbers(4, 8, key=f"leaf {micro_batch.index}")).square().mean().backward()
    instep.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    model(numbers(2 + mesh.rank, 8, key=f"rank {mesh.rank}")).square().mean().backward()
    optimizer.step()
    found = {name.replace("_orig_mod.", ""): x for name, x in instep.full_state_dict(wrapped).items()}
    close(optimizer, wrapped)
    return found


@on_every_kind(2, LOOPS, by="process")
def test_bits_are_those_of_the_program_that_is_not_compiled(mesh: Mesh, kind: str) -> None:
    expected = all_bits(trained(mesh, KINDS[kind]))
    for way in WAYS:
        compiled = partial(way, backend="aot_eager" if "blocks" in way.__name__ else "eager")
        compiled(Blocks())(
            numbers(4, 8, key="plain")
        )  # no code of blocks without hooks may be used for those with hooks
        for place in PLACES:
            assert all_bits(trained(mesh, KINDS[kind], **{place: compiled})) == expected, (way, place)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_one_graph_of_what_exchanges_is_refused_in_words(kind: str, way: Compile) -> None:
    torch._dynamo.reset()
    compiled = partial(way, backend="eager", fullgraph=True)
    if kind == "replicated" and "blocks" in way.__name__:  # no block exchanges
        trained(world_of_one(), KINDS[kind], after=compiled)
        return
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"no graph can have: leave out fullgraph=True, or put"
    ):
        trained(world_of_one(), KINDS[kind], after=compiled)


@on_every_kind(1, WRAPPERS)
def test_a_compiled_wrapper_is_saved_as_the_wrapper_and_blocks_that_keep_their_names(
    mesh: Mesh, kind: str, tmp_path: Path
) -> None:
    def made(compiled: Compile, name: str) -> Path:
        wrapped, optimizer = KINDS[kind].make(filled(Blocks()), mesh)
        model = compiled(wrapped, backend="eager")
        for micro_batch in wrapped.micro_batches(2):
            wrapped(numbers(4, 8, key=f"leaf {micro_batch.index}")).square().mean().backward()
        path = instep.save(tmp_path / name, step=7, model=model)
        mesh.world.group.barrier("the test")
        other, again = KINDS[kind].make(Blocks(), mesh)
        instep.load(tmp_path / name, model=compiled(other, backend="eager"))
        assert other.__instep_state__().counter.next_step == 1
        close(optimizer, wrapped, again, other)
        return path.parent

    for compiled in (by_function, by_method, blocks_by_method):
        assert instep.load(made(compiled, compiled.__name__), model=Blocks()).step == 7
    renamed = made(blocks_by_function, "renamed")
    with pytest.raises(CheckpointRejected, match=r"compile with block\.compile\(\), which keeps the names"):
        instep.load(renamed, model=Blocks())


@pytest.mark.parametrize("kind", WRAPPERS)
def test_compiled_autograd_is_refused_and_the_model_trains_on(kind: str) -> None:
    model, _ = KINDS[kind].make(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), world_of_one())

    def backward() -> None:
        model(torch.ones(2, 4)).square().mean().backward()

    compiled = compiled_autograd._enable(partial(torch.compile, backend="eager"))
    words = r"set torch\._dynamo\.config\.compiled_autograd = False"
    with pytest.raises((RuntimeError, ValueError), match=words), compiled:
        backward()
    model.zero_grad()
    backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.close()
