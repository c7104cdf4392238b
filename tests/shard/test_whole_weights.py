"""Parameters are this rank's shards between steps, and whole where modules compute; misuse is an error."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, AdamW

import instep
from instep.errors import Desync
from instep.mesh.mesh import Mesh
from instep.models.config import GPTConfig
from instep.models.transformer import GPT
from instep.reduce.norm import clip_grad_norm_
from instep.rng.keys import initialize
from instep.shard.fully import FullySharded, full_state_dict, fully_shard
from instep.shard.optimizer import ShardedOptimizer
from tests.kinds import Program, assert_same_state, on_every_kind, replicated_alone
from tests.parity import filled, numbers, world_of_one
from tests.replicate.nets import Dense, Segments, requires_input, two_backwards
from tests.shard.trained import Wide, assert_same, wide_step
from tests.world import world

WIDTH = 72  # a matrix of WIDTH x WIDTH has a block and a part of one
STAGES = pytest.mark.parametrize("stage", [2, 3])


class Stack(nn.Module):
    """A root with parameters before and after a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.out(x)


def loss_of(module: nn.Module, key: str = "x") -> Tensor:
    loss: Tensor = module(numbers(4, 12, key=key)).square().mean()
    return loss


def gathered_units(model: Any) -> list[str]:
    return [unit.name for unit in model.sharding.units if unit.is_allocated]


@world(2)
def test_a_parameter_is_this_ranks_shard_with_as_many_dims(mesh: Mesh) -> None:
    plain = filled(Stack())
    model = instep.fully_shard(filled(Stack()), mesh)
    shards = dict(model.named_parameters())
    assert [p.dim() for p in shards.values()] == [p.dim() for p in plain.parameters()]
    sizes = json.dumps([p.numel() for p in shards.values()]).encode()
    by_rank = map(json.loads, mesh.world.group.all_gather_bytes(sizes, "sizes"))
    assert [sum(each) for each in zip(*by_rank, strict=True)] == [p.numel() for p in plain.parameters()]
    with instep.gathered(model):
        assert all(p is shards[name] for name, p in model.named_parameters())
        assert_same(dict(model.state_dict()), dict(plain.state_dict()), "whole")
    assert sum(p.numel() for p in shards.values()) < sum(p.numel() for p in plain.parameters())
    model.close()


@world(2)
def test_weights_come_for_a_unit_and_go_after_it(mesh: Mesh) -> None:
    model = instep.fully_shard(filled(Stack()), mesh)
    seen: list[list[str]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(gathered_units(model)))
        layer.register_full_backward_hook(lambda *_: seen.append(gathered_units(model)))
    for _ in range(2):  # the second knows the order, and prefetches
        seen.clear()
        loss_of(model).backward()
        assert max(map(len, seen)) <= 4  # the root, the one that computes, the one before or after it
        assert gathered_units(model) == []
    with torch.no_grad():
        loss_of(model)
    assert gathered_units(model) == []
    model.close()


@world(2)
def test_stage_2_keeps_the_weights_until_they_change(mesh: Mesh) -> None:
    model = instep.fully_shard(filled(Stack()), mesh, 2)
    asked: list[str] = []
    fill, gathers = model.sharding.gathers._fill, model.sharding.gathers
    gathers._fill = lambda unit, name: (asked.append(unit.name), fill(unit, name))[1]
    for _ in range(3):
        loss_of(model).backward()
    assert len(asked) == 5
    AdamW(model.parameters(), fused=True).step()  # which counts no writes
    with torch.no_grad():
        loss_of(model)
    assert len(asked) == 10
    model.close()


@world(2)
@STAGES
def test_what_is_written_inside_gathered_is_kept(mesh: Mesh, stage: int) -> None:
    model, other = instep.fully_shard(filled(Stack()), mesh, stage), Stack()
    with instep.gathered(model):
        model.load_state_dict(other_values := filled(nn.ModuleDict({"other": other}))["other"].state_dict())
        assert_same(instep.full_state_dict(model), dict(other_values), "loaded, and still inside")
    assert_same(instep.full_state_dict(model), dict(other_values), "loaded")
    torch.testing.assert_close(loss_of(model), loss_of(other))
    model.close()


@world(2)
@STAGES
def test_double_backward_has_the_bits_of_one_process(mesh: Mesh, stage: int) -> None:
    def penalty(module: nn.Module) -> Tensor:
        x = numbers(4, 12, key="x").requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return gradient.square().mean()

    found = []
    for on in (mesh, world_of_one()):
        model = instep.fully_shard(filled(Stack()), on, stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in model.micro_batches(2):
            penalty(model).backward()
        optimizer.step()
        found.append(instep.full_state_dict(model))
        assert stage == 2 or on.world.size == 1 or gathered_units(model) == []
        model.close()
    assert_same(found[0], found[1], "weights")


@world(2)
@STAGES
def test_a_grad_scaler_skips_the_step_on_all_ranks_or_on_none(mesh: Mesh, stage: int) -> None:
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = instep.full_state_dict(model)
    scaler.scale(loss_of(model)).backward()
    if mesh.rank == 1:
        next(p.grad for p in model.parameters() if p.numel()).view(-1)[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(instep.full_state_dict(model), before, "skipped")
    model.close()


def of_torch(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def of_torch_on_a_new_gradient(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.grad = p.grad / 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def of_the_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.step()
    optimizer.state_dict()


def of_another_world(model: Any, optimizer: Any) -> None:
    whole = AdamW(Stack().parameters())
    for p in (p for group in whole.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    whole.step()
    optimizer.load_state_dict(whole.state_dict())
    optimizer.step()


def outside(model: Any, optimizer: Any) -> None:
    (loss_of(model) + sum(p.sum() for p in model.layers[0].parameters())).backward()


def hooked(model: Any, optimizer: Any) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)
    loss_of(model)


def written(model: Any, optimizer: Any) -> None:
    def write(module: Any, *_: Any) -> None:
        module.bias.detach().zero_()

    model.layers[1].register_forward_pre_hook(write)
    loss_of(model)


def within(model: Any, optimizer: Any) -> None:
    with instep.gathered(model):
        loss_of(model)


REFUSED: dict[str, tuple[Callable[[Any, Any], None], type[Exception], str]] = {
    "torch's clipping": (of_torch, RuntimeError, r"gradient shard.*instep\.clip_grad_norm_"),
    "torch's clipping of a new gradient": (of_torch_on_a_new_gradient, RuntimeError, "gradient shard"),
    "a norm by hand": (lambda m, o: m.into.weight.grad.data.norm(2), RuntimeError, "gradient shard"),
    "a state dict": (
        lambda m, o: m.state_dict(),
        RuntimeError,
        r"'into\.weight' is this rank's shard",
    ),
    "loading one": (lambda m, o: m.load_state_dict(Stack().state_dict()), RuntimeError, r"instep\.gathered"),
    "an optimizer's state": (
        of_the_optimizer,
        RuntimeError,
        r"this rank's part alone: save",
    ),
    "a whole optimizer's state": (of_another_world, ValueError, r"for a shard of shape"),
    "a weight outside of its unit": (
        outside,
        ValueError,
        r"'layers\.0\.\w+' was used outside",
    ),
    "a parameter's hook": (hooked, ValueError, r"'into\.weight' has a hook"),
    "writing in forward": (written, RuntimeError, r"'layers\.1\.bias' was written to in forward"),
    "Adafactor": (
        lambda m, o: torch.optim.Adafactor(m.parameters()).step(),
        RuntimeError,
        "Adafactor looks at whole parameters",
    ),
    "forward inside gathered": (within, ValueError, r"forward inside of instep\.gathered"),
    "a copy": (lambda m, o: copy.deepcopy(m), TypeError, "full_state_dict"),
}


@pytest.mark.parametrize("case", REFUSED)
@world(2)
def test_what_takes_a_shard_for_the_whole_is_refused(mesh: Mesh, case: str) -> None:
    misuse, error, match = REFUSED[case]
    model = instep.fully_shard(filled(Stack()), mesh)
    optimizer = AdamW(model.parameters())
    loss_of(model).backward()
    with pytest.raises(error, match=match):
        misuse(model, optimizer)
    model.close()


@world(2)
def test_ranks_that_run_other_units_all_raise_and_name_them(mesh: Mesh) -> None:
    class Either(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layers[self.number](self.into(x)))

    model = instep.fully_shard(filled(Either()), mesh, find_unused_parameters=True)
    model.number = mesh.rank
    with pytest.raises(Desync, match=r"rank 0 gathers unit 'layers\.0'; rank 1 gathers unit 'layers\.1'"):
        loss_of(model)
    model.number = 2
    loss_of(model).backward()
    model.close()


def fail(*_: Any) -> None:
    raise ArithmeticError("planted")


@world(2)
@STAGES
def test_a_step_on_top_of_gradients_is_refused_by_all_ranks(mesh: Mesh, stage: int) -> None:
    """The second rank has no part of the weight, and went on alone until the deadline."""
    model = instep.fully_shard(filled(nn.Linear(12, 1, bias=False)), mesh, stage)
    loss_of(model).backward()
    with pytest.raises(ValueError, match="already has a gradient"):
        next(model.micro_batches(2))
    model.zero_grad(set_to_none=False)
    for _ in model.micro_batches(2):
        loss_of(model).backward()
    model.close()


@world(2)
@STAGES
def test_the_step_after_a_forward_that_raised_gathers_the_same_units(mesh: Mesh, stage: int) -> None:
    """In stage 2 the rank that raised gathered a unit again that the other one had kept."""
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    loss_of(model).backward()  # from now on units are prefetched
    AdamW(model.parameters(), fused=True).step()

    handle = model.layers[0].register_forward_pre_hook(fail) if mesh.rank else None
    with pytest.raises((ArithmeticError, Desync)):
        loss_of(model)
    if handle is not None:
        handle.remove()
    loss_of(model).backward()
    model.close()


@world(2)
@STAGES
def test_what_is_written_through_data_inside_gathered_is_kept(mesh: Mesh, stage: int) -> None:
    """Initialisation often writes so, and torch does not count it; a rank that had no part counted less."""
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    loss_of(model).backward()  # stage 2 has all weights now
    with instep.gathered(model):
        model.layers[1].weight.data.mul_(2)
        model.into.weight.data[-1] = 5.0  # of one rank's shard alone
        expected = {name: x.clone() for name, x in model.state_dict().items()}
    assert_same(instep.full_state_dict(model), expected, "written")
    plain = Stack()
    plain.load_state_dict(expected)
    torch.testing.assert_close(loss_of(model), loss_of(plain))
    model.zero_grad()
    loss_of(model).backward()
    model.close()


@world(2)
@STAGES
def test_a_gradient_that_a_program_has_set_is_clipped_by_the_norm_over_all_ranks(
    mesh: Mesh, stage: int
) -> None:
    """Each rank took the norm of its own part, and scaled by another factor."""
    model = instep.fully_shard(filled(Stack()), mesh, stage)
    found = []
    for change in (lambda x: x.mul_(2), lambda x: x * 2, lambda x: x.clone() * 2):
        model.zero_grad()
        loss_of(model).backward()
        for p in model.parameters():
            p.grad = change(p.grad)
        found.append(instep.clip_grad_norm_(model.parameters(), 0.1).item())
    assert found[0] == found[1] == found[2]
    model.close()


LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}


def backwards(model: nn.Module, num_leaves: int = 5) -> None:
    for micro_batch in model.micro_batches(num_leaves, step=0):  # type: ignore[operator]
        wide_step(model, micro_batch, 0)


def plain(mesh: Mesh, model: nn.Module) -> None:
    model(numbers(4, WIDTH, key=f"on rank {mesh.rank}")).square().mean().backward()


@world(2)
@STAGES
def test_ranks_with_other_units_raise_on_both(mesh: Mesh, stage: int) -> None:
    model = filled(Wide())
    with pytest.raises(ValueError, match=r"the ranks differ in units: unit .* on rank 0, but .* on rank 1"):
        fully_shard(model, mesh, stage, units=[model.layers[0]] if mesh.rank else None)


@world(2)
@STAGES
def test_a_sharded_optimizer_that_was_made_before_is_refused_by_name(mesh: Mesh, stage: int) -> None:
    module = filled(Wide())
    optimizer = ShardedOptimizer(module.parameters(), SGD, mesh, **LOOP)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' has a ShardedOptimizer already.*first"):
        fully_shard(module, mesh, stage)
    assert type(module) is Wide
    optimizer.close()
    model = fully_shard(module, mesh, stage)
    model.close()


@world(2)
@STAGES
def test_what_moves_the_parameters_after_sharding_is_an_error(mesh: Mesh, stage: int) -> None:
    """With ``set_`` and ``vector_to_parameters`` training went on with the values from before."""

    def replace_one(model: nn.Module) -> None:
        p = next(model.parameters())
        p.data = torch.zeros(p.shape, dtype=torch.float64)

    def halve(model: nn.Module) -> None:
        vector_to_parameters(parameters_to_vector(model.parameters()).detach() / 2, model.parameters())

    def assign(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.set_(torch.full_like(p, 0.1))

    way_out = r"vector_to_parameters.*p\.copy_\(values\) under no_grad"
    for change in (nn.Module.double, replace_one, halve, assign):
        model = fully_shard(filled(Wide()), mesh, stage)
        wrong = rf"'layers\.0\.weight' (has|would have) other memory than when it was sharded|{way_out}"
        with pytest.raises(ValueError, match=wrong):  # noqa: PT012
            change(model)
            backwards(model, 2)
        model.close()


@world(2)
def test_arguments_that_cannot_be_meant(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="stage=1: expected 2"):
        fully_shard(Wide(), mesh, 1)
    with pytest.raises(ValueError, match=r"expected one of floating point, got torch\.int8"):
        fully_shard(Wide(), mesh, 2, compute_dtype=torch.int8)
    for order in (torch.channels_last, None):
        conv = nn.Conv2d(3, 4, 3).to(memory_format=order) if order else nn.Linear(3, 4)
        if order is None:
            conv.weight.data = conv.weight.data.t().contiguous().t()
        with pytest.raises(ValueError, match="'weight' cannot be sharded: it is not contiguous"):
            fully_shard(conv, mesh)
    hooked = nn.Linear(3, 4)
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="'weight' cannot be sharded: it has a hook"):
        fully_shard(hooked, mesh)
    for name in ("group", "verify"):
        with pytest.raises(ValueError, match=f"attribute '{name}' of its own"):
            fully_shard(Named(name), mesh)
    with pytest.raises(ValueError, match="'' has sparse gradients"):
        fully_shard(nn.Embedding(4, 2, sparse=True), mesh)
    with pytest.raises(ValueError, match=r"'layers\.0\.weight' is on the meta device"):
        fully_shard(Wide().to("meta"), mesh, 2)


class Named(nn.Module):
    """Has a name of its own that a sharded module needs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        setattr(self, name, "mine")


@STAGES
def test_a_sharded_module_stays_an_instance_of_its_class_until_it_is_closed(stage: int) -> None:
    module = filled(Wide())
    parameters = dict(module.named_parameters())
    model = fully_shard(module, world_of_one(), stage)
    assert model is module and isinstance(model, Wide) and isinstance(model, FullySharded)
    assert type(model).__name__ == "FullyShardedWide"
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(full_state_dict(model)) == list(parameters)
    assert model.step_mode is None and model.placement == {"strategy": "fully_shard", "stage": stage}
    for broken in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model)):
        with pytest.raises(TypeError, match="full_state_dict"):
            broken()
    model(numbers(4, WIDTH, key="x")).sum().backward()
    assert model.step_mode == "undeclared"
    model.close()
    assert type(module) is Wide and not hasattr(module, "micro_batches")
    assert all(p.grad is None for p in module.parameters())


@world(2, by="process")  # threads collect one at a time
@STAGES
def test_a_module_that_is_dropped_is_collected_with_all_that_kept_it_sharded(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage)
    plain(mesh, model)
    kept = [weakref.ref(x) for x in (model, model.sharding, model.sharding.reducer)]
    del model
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


@world(2)
@STAGES
def test_a_state_dict_of_what_is_sharded_in_part_is_whole(mesh: Mesh, stage: int) -> None:
    module = nn.ModuleDict({"sharded": filled(Wide()), "plain": filled(nn.Linear(3, 2))})
    expected = {name: x.clone() for name, x in module.state_dict().items()}
    inner = fully_shard(module["sharded"], mesh, stage)
    ours = full_state_dict(module)
    assert_same(ours, expected, "state")
    with torch.no_grad():
        module["plain"].weight.zero_()
    assert_same(ours, expected, "memory of its own")
    inner.close()


class Borrows(nn.Module):
    """Its second part multiplies with the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) @ self.first.weight)


@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_a_weight_in_the_forward_of_another_module_is_told_as_a_shard(mesh: Mesh, stage: int) -> None:
    model = Borrows()
    fully_shard(model, mesh, stage=stage, units=[model.first, model.second])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.ones(3, 128))
    assert "it is this rank's shard, of another shape. Make both one unit" in raised.value.__notes__[0]
    model.close()


@world(2)
@STAGES
def test_gradients_in_slices_are_discarded_also_where_zeros_are_asked_for(mesh: Mesh, stage: int) -> None:
    model = fully_shard(filled(Wide()), mesh, stage=stage)
    norms = []
    for _ in range(2):
        plain(mesh, model)
        norms.append(clip_grad_norm_(model.parameters(), float("inf")))
        model.zero_grad(set_to_none=False)
        assert clip_grad_norm_(model.parameters(), float("inf")) == 0
    assert norms[0] == norms[1]
    model.close()


def assert_bits(mesh: Mesh, kind: str, one: Program, **wrap: Any) -> None:
    assert_same_state(replace(one, kind=kind, wrap=wrap).trained(mesh), replicated_alone(one))


SEVERAL = Program("replicated", Dense, leaf_step=two_backwards, optimizer=SGD, options=LOOP)
AGAIN = Program("replicated", partial(Segments, True), leaf_step=requires_input, optimizer=SGD, options=LOOP)


@on_every_kind(2, ("stage 2", "stage 3"))
def test_gradients_in_several_parts_are_whole_when_they_are_sent_or_it_says_so(mesh: Mesh, kind: str) -> None:
    """Several backwards of a micro-batch, and a reentrant checkpoint that is used several times."""
    with pytest.raises(Desync, match=r"received gradient number 2 of this backward.*pass overlap=False"):
        replace(SEVERAL, kind=kind).trained(mesh)
    assert_bits(mesh, kind, SEVERAL, overlap=False)
    assert_bits(mesh, kind, AGAIN)


class Widens(nn.Module):
    """Between its layers it computes in float32; it keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.given: dict[str, Any] = {}

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        self.given = {"x": x, **others}
        for layer in self.layers:
            x = torch.tanh(layer(x).float())
        return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [2, 3])
@world(2)
def test_floating_inputs_of_the_module_and_its_units_are_cast(
    mesh: Mesh, stage: int, dtype: torch.dtype
) -> None:
    model: Any = fully_shard(filled(Widens()), mesh, stage, compute_dtype=dtype)
    x = numbers(4, 8, key="x").requires_grad_()
    nested = {"mask": [torch.ones(2, dtype=torch.float64)], "name": "a"}
    out = model(x, tokens=torch.arange(3), nested=nested)
    given = model.given
    assert given["x"].dtype == given["nested"]["mask"][0].dtype == dtype
    assert given["tokens"].dtype == torch.int64 and given["nested"]["name"] == "a"
    assert nested["mask"][0].dtype == torch.float64  # the caller's own stays
    out.square().mean().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert_same(full_state_dict(model), dict(filled(Widens()).state_dict()), "weights")
    model.close()


@contextmanager
def sharded(mesh: Mesh, module: nn.Module) -> Iterator[Any]:
    model = fully_shard(module, mesh)
    yield model
    model.close()


CONFIG = GPTConfig(layers=3, width=48, heads=2, context=8, tied=True)


def on_meta(kind: type[nn.Module], *arguments: object) -> nn.Module:
    with torch.device("meta"):
        return kind(*arguments)


def fill(name: str, tensor: Tensor) -> None:
    tensor.copy_(0.3 * numbers(*tensor.shape, key=name))


@world(2)
def test_a_model_that_fills_its_parameters_by_name_gets_the_weights_of_one_process(mesh: Mesh) -> None:
    plain = GPT(CONFIG)
    initialize(plain, seed=7)
    module = on_meta(GPT, CONFIG)
    parameters = list(module.parameters())
    with sharded(mesh, module) as model:
        assert not any(p.is_meta for p in module.parameters())
        assert all(p is before for p, before in zip(module.parameters(), parameters, strict=True))
        model.materialise(seed=7)
        assert gathered_units(model) == []
        assert_same(full_state_dict(module), dict(plain.state_dict()), "values")
        tokens = torch.arange(16).view(2, 8)
        assert torch.equal(module(tokens), plain(tokens))


class Standard(nn.Module):
    """Submodules of torch, one of which sets what its children have set already; and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(2))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@world(2, by="process")
def test_submodules_fill_themselves_alike_on_all_ranks_whatever_their_generators(mesh: Mesh) -> None:
    torch.manual_seed(mesh.rank)
    before = torch.get_rng_state()
    module = on_meta(Standard)
    with sharded(mesh, module) as model:
        model.materialise(seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        values = full_state_dict(module)
        assert torch.equal(module.norm.running_var, torch.ones(16))
        loss_of(module).backward()
    group = mesh.whole.duplicate()
    for name, x in values.items():
        by_rank = group.all_gather_bytes(x.numpy().tobytes(), name)
        assert by_rank[0] == by_rank[1], name
    # The bounds of torch's own initialisation.
    assert 0.2 < values["into.weight"].abs().max() <= 12**-0.5
    assert 0.25 < values["layers.1.self_attn.in_proj_weight"].abs().max() <= (6 / (16 + 48)) ** 0.5
    assert not values["layers.0.self_attn.out_proj.bias"].any()
    assert not torch.equal(values["layers.0.linear1.weight"], values["layers.1.linear1.weight"])


@world(2)
def test_without_values_a_forward_says_what_to_call(mesh: Mesh) -> None:
    module = on_meta(Stack)
    message = r"'into\.weight' was on the meta device .* materialise\(\)"
    with sharded(mesh, module), pytest.raises(ValueError, match=message):
        loss_of(module)


class Unfillable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


@world(1)
def test_a_submodule_that_cannot_fill_itself_is_named(mesh: Mesh) -> None:
    module = on_meta(Stack)
    module.layers[0] = on_meta(Unfillable)
    message = r"'layers\.0', a Unfillable, has parameters on the meta device"
    with sharded(mesh, module) as model, pytest.raises(ValueError, match=message):
        model.materialise()
