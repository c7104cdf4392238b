"""Steps over the global batch: the bits of any placement, and the numbers of one process."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instep.data.loader import Loader
from instep.errors import Desync
from instep.events import BATCH_NORM, GLOBAL_LOSS
from instep.mesh.mesh import Mesh
from instep.nn import BatchNorm, InfoNCE, SupCon, global_step
from instep.replicate.wrapper import DataParallel
from instep.shard.fully import full_state_dict, fully_shard
from instep.step.micro_batches import MicroBatch
from instep.timeline.bubbles import bubbles
from tests.parity import bits, filled, numbers, world_of_one
from tests.world import world

G, ROWS, WIDTH = 8, 4, 6
_bits: dict[str, list[Tensor]] = {}
_lock = threading.Lock()


class Clip(nn.Module):
    """Two towers and a learned temperature."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.image = self.tower(norm, dropout)
        self.text = self.tower(norm, dropout)
        self.loss = InfoNCE(0.2, learnable=True, symmetric=True)

    def tower(self, norm: bool, dropout: float) -> nn.Module:
        between = [BatchNorm(9)] if norm else []
        after = [BatchNorm(5)] if norm else []
        return nn.Sequential(
            nn.Linear(WIDTH, 9), *between, nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 5), *after
        )

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.image(images), self.text(texts)


def inputs(leaf: int, step: int = 0) -> tuple[Tensor, Tensor]:
    return numbers(ROWS, WIDTH, key=f"images {step} {leaf}"), numbers(ROWS, WIDTH, key=f"texts {step} {leaf}")


def trained(mesh: Mesh, **options: Any) -> list[Tensor]:
    module = filled(Clip(**options))
    model = DataParallel(module, mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02, fused=False, foreach=False)
    found = []
    for step in range(2):
        embed = partial(lambda step, m: model(*inputs(m.index, step)), step)
        found.append(global_step(model, embed, module.loss, G))
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return [*found, *(x.detach().clone() for x in (*module.parameters(), *module.buffers()))]


def bits_of_one(**options: Any) -> list[Tensor]:
    key = str(options)
    with _lock:
        if key not in _bits:
            _bits[key] = trained(world_of_one(), **options)
        return _bits[key]


def assert_bits_of_one(mesh: Mesh, **options: Any) -> None:
    for x, y in zip(trained(mesh, **options), bits_of_one(**options), strict=True):
        assert torch.equal(bits(x), bits(y))


NORMS = pytest.mark.parametrize("norm", [False, True])


@world(2)
@NORMS
def test_two_ranks_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(3)
@NORMS
def test_three_ranks_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(4)
@NORMS
def test_four_ranks_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(7)
@NORMS
def test_ranks_of_one_and_of_two_micro_batches_have_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(9)
@NORMS
def test_a_rank_without_micro_batches_has_the_bits_of_one(mesh, norm):
    assert_bits_of_one(mesh, norm=norm)


@world(3, by="process")
@NORMS
def test_dropout_is_the_same_in_each_pass_and_on_any_number_of_ranks(mesh, norm):
    assert_bits_of_one(mesh, norm=norm, dropout=0.4)


# Against one process with the whole batch.


def whole_batch(step: int = 0) -> tuple[Tensor, Tensor]:
    images, texts = zip(*(inputs(leaf, step) for leaf in range(G)), strict=True)
    return torch.cat(images).double(), torch.cat(texts).double()


def reference(module: nn.Module) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """The loss, gradients and buffers of plain torch on the whole batch."""
    alone = copy.deepcopy(module)
    value = alone.loss(*alone(*whole_batch()))
    value.backward()
    return value.detach(), [p.grad for p in alone.parameters()], list(alone.buffers())


def as_torch(module: nn.Module) -> nn.Module:
    """``module`` with torch's own batch norm."""
    found = copy.deepcopy(module)
    for name, m in list(found.named_modules()):
        if isinstance(m, BatchNorm):
            plain = nn.BatchNorm1d(m.num_features, dtype=torch.float64)
            plain.load_state_dict(m.state_dict())
            found.set_submodule(name, plain)
    return found


@world(3)
@NORMS
def test_the_step_is_that_of_one_process_with_the_whole_batch(mesh, norm):
    module = filled(Clip(norm=norm)).double()
    expected, gradients, buffers = reference(as_torch(module))
    model = DataParallel(module, mesh)
    value = global_step(model, lambda m: model(*(x.double() for x in inputs(m.index))), module.loss, G)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    for (name, p), gradient in zip(module.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    for x, y in zip(module.buffers(), buffers, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)
    assert module.loss.logit_scale.grad.abs() > 1e-3
    model.close()


@world(2)
def test_a_loss_per_rank_differs(mesh):
    """The control: what a loop computes whose loss sees this rank's samples alone."""
    module = filled(Clip())
    model = DataParallel(module, mesh)
    for micro_batch in model.micro_batches(G):
        module.loss(*model(*inputs(micro_batch.index))).backward()
    alone = filled(Clip()).double()
    _, gradients, _ = reference(alone)
    assert not torch.allclose(module.image[0].weight.grad.double(), gradients[0], rtol=0.1)
    model.close()


class Norms(nn.Module):
    """A norm that is called twice, one that the loss does not use, and torch's, per micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.twice = BatchNorm(WIDTH)
        self.unused = BatchNorm(WIDTH, affine=False, momentum=None)
        self.own = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(x)
        x = self.layers[0](x).tanh()
        self.unused(self.layers[1](x))
        x = x + self.layers[2](self.twice(x)).tanh()
        return self.own(x)


def trained_norms(mesh: Mesh) -> list[Tensor]:
    module = filled(Norms())
    model = DataParallel(module, mesh, find_unused_parameters=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(2):
        global_step(model, lambda m: model(inputs(m.index)[0]).square().mean(1), torch.mean, G)
        optimizer.step()
        optimizer.zero_grad()
    model.close()
    return [x.detach().clone() for x in (*module.parameters(), *module.buffers())]


def assert_norms_have_the_bits_of_one(mesh: Mesh) -> None:
    with _lock:
        if "norms" not in _bits:
            _bits["norms"] = trained_norms(world_of_one())
    assert all(map(torch.equal, map(bits, trained_norms(mesh)), map(bits, _bits["norms"])))


@world(3)
def test_norms_called_twice_or_in_vain_and_torchs_own_have_the_bits_of_one(mesh):
    assert_norms_have_the_bits_of_one(mesh)


@world(8)
def test_norms_on_ranks_of_one_micro_batch_have_the_bits_of_one(mesh):
    assert_norms_have_the_bits_of_one(mesh)


# Other wrappers and data.


class Plain(nn.Module):
    """Two towers, and nothing that the loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, 5)) for _ in range(2)])

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.towers[0](images), self.towers[1](texts)


def weights_after(model: Any, steps: int = 2) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=False, foreach=False)
    for _ in range(steps):
        global_step(model, lambda m: model(*inputs(m.index)), InfoNCE(), G)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: x.clone() for name, x in full_state_dict(model).items()}
    model.close()
    return found


@world(3)
@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_towers_have_the_bits_of_replicated_ones(mesh, stage):
    expected = weights_after(DataParallel(filled(Plain()), world_of_one()))
    found = weights_after(fully_shard(filled(Plain()), mesh, stage=stage))
    assert all(torch.equal(bits(x), bits(expected[name])) for name, x in found.items())


@world(2)
def test_a_loader_gives_the_samples_and_is_read_once_per_step(mesh):
    images, texts = (torch.cat(its) for its in zip(*map(inputs, range(G)), strict=True))
    labels = torch.arange(len(images)) // 3
    dataset = list(zip(images, texts, labels, strict=True))
    loader = Loader(dataset, batch_size=G * ROWS, micro_batch_size=ROWS, shuffle=False)
    model = DataParallel(filled(Plain()), mesh)
    seen = []

    def embed(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        x, y, its = micro_batch.data
        return torch.cat(model(x, y), dim=1), its

    def loss(x: Tensor, its: Tensor) -> Tensor:
        seen.append(its)
        return SupCon()(x, its)

    found = global_step(model, embed, loss, loader)
    assert torch.equal(seen[0], labels) and loader.position == len(dataset)
    module = filled(Plain())
    torch.testing.assert_close(found, SupCon()(torch.cat(module(images, texts), dim=1), labels).detach())
    model.close()


def late_in_the_first_passes(name: str, begins: bool) -> None:
    if begins and not torch.is_grad_enabled():
        threading.Event().wait(0.05)


@world(2)
@pytest.mark.parametrize(("norm", "cause"), [(True, BATCH_NORM), (False, GLOBAL_LOSS)])
def test_a_slow_rank_is_waited_for_by_name(mesh, norm, cause):
    """Rank 1 is late in forward: rank 0 waits where statistics, or embeddings, are exchanged."""
    model = DataParallel(filled(Clip(norm=norm)), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if mesh.rank == 1:
        model.recorder.watched, model.recorder.watch = ("forward",), late_in_the_first_passes
    global_step(model, lambda m: model(*inputs(m.index)), model.module.loss, G)
    optimizer.step()
    model.recorder.watched = ()
    waited = Counter[str]()
    for bubble in bubbles([x for x in model.recorder.events if x.step == 0]):
        waited[bubble.cause] += bubble.duration_s
    if mesh.rank == 0:
        assert waited.most_common(1)[0][0] == cause
        assert waited[cause] > 4 * 0.04
    model.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks
def test_compiled_towers_have_the_same_gradients():
    gradients = []
    for compiled in (False, True):
        module = filled(Clip(norm=True))
        model = DataParallel(module, world_of_one())
        call = torch.compile(model, backend="eager") if compiled else model
        global_step(model, lambda m, call=call: call(*inputs(m.index)), module.loss, G)
        gradients.append([p.grad for p in module.parameters()])
        model.close()
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


@world(2)
def test_autocast_gathers_what_it_computes(mesh):
    model = DataParallel(filled(Plain()), mesh)
    seen = []

    def embed(micro_batch: MicroBatch) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(*inputs(micro_batch.index))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        seen.extend([x.dtype, y.dtype])
        return InfoNCE()(x, y)

    assert global_step(model, embed, loss, G).dtype == torch.float32
    assert seen == [torch.bfloat16] * 2
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in model.parameters())
    model.close()


# What is refused.


def refused(mesh: Any, module: nn.Module, embed: Any = None, loss: Any = torch.mean) -> Any:
    model = DataParallel(filled(module), mesh)
    return global_step(model, embed or (lambda m: model(inputs(m.index)[0])), loss, G)


def count_once(mesh: Any) -> None:
    data = iter(range(1000))
    module = nn.Linear(WIDTH, 2)
    refused(mesh, module, lambda m: module(numbers(ROWS, WIDTH, key=f"{next(data)}")))


def outside(mesh: Any) -> None:
    refused(mesh, nn.Linear(WIDTH, 5), None, lambda x: InfoNCE(learnable=True)(x, x.detach()))


def frozen(mesh: Any) -> None:
    refused(mesh, nn.Linear(WIDTH, 2), lambda m: torch.ones(2, 2), lambda x: x.sum())


def in_the_loss(mesh: Any) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), BatchNorm(WIDTH))
    refused(mesh, module, lambda m: module[0](inputs(m.index)[0]), lambda x: module[1](x).mean())


def checkpointed(mesh: Any) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), BatchNorm(WIDTH))
    refused(mesh, module, lambda m: checkpoint(module, inputs(m.index)[0], use_reentrant=False))


def another_order(mesh: Any) -> None:
    module = nn.Sequential(BatchNorm(WIDTH), BatchNorm(WIDTH), nn.Linear(WIDTH, 1))

    def embed(micro_batch: MicroBatch) -> Tensor:
        order = (0, 1) if micro_batch.index < 4 else (1, 0)
        return module[2](module[order[1]](module[order[0]](inputs(micro_batch.index)[0])))

    refused(mesh, module, embed)


def in_a_loop(mesh: Any) -> None:
    for _ in DataParallel(nn.Sequential(nn.Linear(2, 2), BatchNorm(2)), mesh).micro_batches(G):
        pass


def sharded_norm(mesh: Any) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), BatchNorm(2)), mesh)
    global_step(model, lambda m: model(torch.ones(2, 2)), torch.mean, G)


def sharded_loss(mesh: Any) -> None:
    model = fully_shard(filled(Clip()), mesh)
    global_step(model, lambda m: model(*inputs(m.index)), model.loss, G)


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda mesh: global_step(nn.Linear(2, 2), None, torch.mean, G),
        "expected a DataParallel.*wrap it",
    ),
    (
        lambda mesh: refused(mesh, nn.Linear(WIDTH, 2), lambda m: None),
        r"expected a tensor \(samples.*got None",
    ),
    (
        lambda mesh: refused(mesh, nn.Linear(WIDTH, 2), None, lambda x: x),
        r"expected a scalar tensor, got \(32, 2\)",
    ),
    (lambda mesh: refused(mesh, nn.Linear(WIDTH, 2), None, lambda x: x.detach().sum()), "has no gradient"),
    (outside, r"a parameter of shape \(\) that no rank would reduce.*a part of the module that DataParallel"),
    (frozen, "embed returns for micro-batch 0 needs no gradient"),
    (count_once, "embed gives something else for micro-batch 0 in another pass.*by micro_batch.index"),
    (in_the_loss, "'1', an instep.nn.BatchNorm, was called by the loss, in a.*GroupNorm"),
    (checkpointed, "'1', an instep.nn.BatchNorm, was called by the loss, in a checkpointed block"),
    (another_order, "micro-batch 0 is at '0', micro-batch 4 at '1': all have to call"),
    (in_a_loop, r"'1' is an instep.nn.BatchNorm.*call instep.nn.global_step\(model, embed, loss"),
    (sharded_norm, "'1', an instep.nn.BatchNorm, was called .*or in a module of fully_shard"),
    (
        sharded_loss,
        "the loss trains a parameter of shape .* that no rank would reduce.*with fully_shard, freeze it",
    ),
]


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_what_is_refused(call, match):
    with pytest.raises((ValueError, TypeError), match=match):
        call(world_of_one())


@world(2)
def test_a_loss_that_depends_on_the_rank_is_refused_on_all(mesh):
    with pytest.raises(
        Desync, match=r"the loss is \[0.*\] by rank: it has to be a function of the embeddings"
    ):
        refused(mesh, nn.Linear(WIDTH, 2), None, lambda x: x.mean() * 0 + mesh.rank)


@world(2)
def test_a_rank_that_raises_is_named_and_the_next_step_goes_well(mesh):
    module = filled(Clip(norm=True))
    model = DataParallel(module, mesh)

    def embed(micro_batch: MicroBatch, fails: bool) -> Any:
        if fails and micro_batch.index == 6:
            raise KeyError("a sample")
        return model(*inputs(micro_batch.index))

    error, match = (KeyError, "a sample") if mesh.rank == 1 else (Desync, "rank 1 left step 0")
    before = [x.clone() for x in module.buffers()]
    with pytest.raises(error, match=match):
        global_step(model, partial(embed, fails=True), module.loss, G)
    assert all(map(torch.equal, module.buffers(), before)) and module.image[1].settling is None
    global_step(model, partial(embed, fails=False), module.loss, G)
    alone = filled(Clip(norm=True))
    one = DataParallel(alone, world_of_one())
    global_step(one, lambda m: one(*inputs(m.index)), alone.loss, G)
    for p, other in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(bits(p.grad), bits(other.grad))
    model.close()
