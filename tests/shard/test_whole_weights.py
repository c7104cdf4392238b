"""Parameters are this rank's shards between steps, and whole where modules compute; misuse is an error."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
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
from instep.rng.keys import initialize
from instep.shard.fully import FullySharded
from tests.kinds import Program, assert_same_state, on_every_kind, replicated_alone
from tests.parity import fill, filled, numbers, world_of_one
from tests.replicate.nets import Dense, Segments, requires_input, two_backwards
from tests.shard.trained import assert_same
from tests.world import world

WIDTH = 72  # a matrix of WIDTH x WIDTH has a block and a part of one
STAGES = pytest.mark.parametrize("stage", [2, 3])
LOOP = {"lr": 0.05, "momentum": 0.9, "foreach": False, "fused": False}


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


def sharded(mesh: Any, stage: int = 3, module: nn.Module | None = None, **options: Any) -> Any:
    return instep.fully_shard(filled(module or Stack()), mesh, stage, **options)


def loss_of(module: nn.Module, key: str = "x") -> Tensor:
    loss: Tensor = module(numbers(4, 12, key=key)).square().mean()
    return loss


def gathered_units(model: Any) -> list[str]:
    return [unit.name for unit in model.sharding.units if unit.is_allocated]


def whole(model: nn.Module) -> dict[str, Tensor]:
    return instep.full_state_dict(model)


@world(2)
def test_a_parameter_is_this_ranks_shard_with_as_many_dims(mesh: Mesh) -> None:
    plain, model = filled(Stack()), sharded(mesh)
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
    model = sharded(mesh)
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
    model = sharded(mesh, 2)
    asked: list[str] = []
    gathers = model.sharding.gathers
    fill_unit = gathers._fill
    gathers._fill = lambda unit, name: (asked.append(unit.name), fill_unit(unit, name))[1]
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
    """Also through ``.data``, as initialisation often writes: torch does not count it."""
    model, other = sharded(mesh, stage), filled(nn.ModuleDict({"other": Stack()}))["other"]
    loss_of(model).backward()  # stage 2 has all weights now
    with instep.gathered(model):
        model.load_state_dict(other.state_dict())
        assert_same(whole(model), dict(other.state_dict()), "loaded, and still inside")
        for module in (model, other):
            module.layers[1].weight.data.mul_(2)
            module.into.weight.data[-1] = 5.0  # of one rank's shard alone
    assert_same(whole(model), dict(other.state_dict()), "written")
    torch.testing.assert_close(loss_of(model), loss_of(other))
    model.zero_grad()
    loss_of(model).backward()
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
        model = sharded(on, stage)
        for _ in model.micro_batches(2):
            penalty(model).backward()
        SGD(model.parameters(), lr=0.1).step()
        found.append(whole(model))
        assert stage == 2 or on.world.size == 1 or gathered_units(model) == []
        model.close()
    assert_same(*found, "weights")


@world(2)
@STAGES
def test_a_grad_scaler_skips_the_step_on_all_ranks_or_on_none(mesh: Mesh, stage: int) -> None:
    model = sharded(mesh, stage)
    scaler, before = torch.amp.GradScaler("cpu", init_scale=4.0), whole(model)
    scaler.scale(loss_of(model)).backward()
    if mesh.rank == 1:
        next(p.grad for p in model.parameters() if p.numel()).view(-1)[0] = torch.inf
    scaler.step(SGD(model.parameters(), lr=0.1))
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same(whole(model), before, "skipped")
    model.close()


@world(2)
@STAGES
def test_gradients_that_a_program_sets_or_zeroes_count_as_those_of_all_ranks(mesh: Mesh, stage: int) -> None:
    """Each rank took the norm of its own part of a set one, and scaled by another factor."""
    model, found = sharded(mesh, stage), []
    for change in (lambda x: x.mul_(2), lambda x: x * 2, lambda x: x.clone() * 2):
        loss_of(model).backward()
        for p in model.parameters():
            p.grad = change(p.grad)
        found.append(instep.clip_grad_norm_(model.parameters(), 0.1).item())
        model.zero_grad(set_to_none=False)
        assert instep.clip_grad_norm_(model.parameters(), 0.1) == 0
    assert found[0] == found[1] == found[2] > 0
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
@STAGES
@world(2)
def test_floating_inputs_of_the_module_and_its_units_are_cast(
    mesh: Mesh, stage: int, dtype: torch.dtype
) -> None:
    model = sharded(mesh, stage, Widens(), compute_dtype=dtype)
    x = numbers(4, 8, key="x").requires_grad_()
    nested = {"mask": [torch.ones(2, dtype=torch.float64)], "name": "a"}
    out = model(x, tokens=torch.arange(3), nested=nested)
    given = model.given
    assert given["x"].dtype == given["nested"]["mask"][0].dtype == dtype
    assert given["tokens"].dtype == torch.int64 and given["nested"]["name"] == "a"
    assert nested["mask"][0].dtype == torch.float64  # the caller's own stays
    out.square().mean().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert_same(whole(model), dict(filled(Widens()).state_dict()), "weights")
    model.close()


@world(2)
@STAGES
def test_a_state_dict_of_what_is_sharded_in_part_is_whole(mesh: Mesh, stage: int) -> None:
    module = nn.ModuleDict({"sharded": filled(Stack()), "plain": filled(nn.Linear(3, 2))})
    expected = {name: x.clone() for name, x in module.state_dict().items()}
    inner = sharded(mesh, stage, module["sharded"])
    expected.update({f"sharded.{name}": x for name, x in whole(inner).items()})
    ours = whole(module)
    with torch.no_grad():
        module["plain"].weight.zero_()
    assert_same(ours, expected, "memory of its own")
    inner.close()


@STAGES
def test_a_sharded_module_stays_an_instance_of_its_class_until_it_is_closed(stage: int) -> None:
    module = Stack()
    parameters = dict(module.named_parameters())
    model = sharded(world_of_one(), stage, module)
    assert model is module and isinstance(model, Stack) and isinstance(model, FullySharded)
    assert type(model).__name__ == "FullyShardedStack"
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(whole(model)) == list(parameters)
    assert model.step_mode is None and model.placement == {"strategy": "fully_shard", "stage": stage}
    for broken in (lambda: copy.deepcopy(model), lambda: pickle.dumps(model)):
        with pytest.raises(TypeError, match="full_state_dict"):
            broken()
    loss_of(model).backward()
    assert model.step_mode == "undeclared"
    model.close()
    assert type(module) is Stack and not hasattr(module, "micro_batches")
    assert all(p.grad is None for p in module.parameters())


@world(2, by="process")  # threads collect one at a time
@STAGES
def test_a_module_that_is_dropped_is_collected_with_all_that_kept_it_sharded(mesh: Mesh, stage: int) -> None:
    model = sharded(mesh, stage)
    loss_of(model).backward()
    kept = [weakref.ref(x) for x in (model, model.sharding, model.sharding.reducer)]
    del model
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


# What takes a shard for the whole.


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
    plain = AdamW(Stack().parameters())
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
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


MISUSES: list[tuple[Callable[[Any, Any], Any], type[Exception], str]] = [
    (of_torch, RuntimeError, r"gradient shard.*instep\.clip_grad_norm_"),
    (of_torch_on_a_new_gradient, RuntimeError, "gradient shard"),
    (lambda m, o: m.into.weight.grad.data.norm(2), RuntimeError, "gradient shard"),
    (lambda m, o: m.state_dict(), RuntimeError, r"'into\.weight' is this rank's shard"),
    (lambda m, o: m.load_state_dict(Stack().state_dict()), RuntimeError, r"instep\.gathered"),
    (of_the_optimizer, RuntimeError, r"this rank's part alone: save"),
    (of_another_world, ValueError, r"for a shard of shape"),
    (outside, ValueError, r"'layers\.0\.\w+' was used outside"),
    (hooked, ValueError, r"'into\.weight' has a hook"),
    (written, RuntimeError, r"'layers\.1\.bias' was written to in forward"),
    (lambda m, o: torch.optim.Adafactor(m.parameters()).step(), RuntimeError, "Adafactor looks at whole par"),
    (within, ValueError, r"forward inside of instep\.gathered"),
    (lambda m, o: next(m.micro_batches(2)), ValueError, "already has a gradient"),
]


@pytest.mark.parametrize(("misuse", "error", "match"), MISUSES)
@world(2)
def test_what_takes_a_shard_for_the_whole_is_refused(
    mesh: Mesh, misuse: Any, error: type[Exception], match: str
) -> None:
    model = sharded(mesh)
    optimizer = AdamW(model.parameters())
    loss_of(model).backward()
    with pytest.raises(error, match=match):
        misuse(model, optimizer)
    model.close()


@world(2)
@STAGES
def test_a_step_on_top_of_gradients_is_refused_by_all_ranks(mesh: Mesh, stage: int) -> None:
    """The second rank has no part of the weight, and went on alone until the deadline."""
    model = sharded(mesh, stage, nn.Linear(12, 1, bias=False))
    loss_of(model).backward()
    with pytest.raises(ValueError, match="already has a gradient"):
        next(model.micro_batches(2))
    model.zero_grad(set_to_none=False)
    for _ in model.micro_batches(2):
        loss_of(model).backward()
    model.close()


class Borrows(nn.Module):
    """Its second part multiplies with the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) @ self.first.weight)


@STAGES
@world(2)
def test_a_weight_in_the_forward_of_another_module_is_told_as_a_shard(mesh: Mesh, stage: int) -> None:
    module = Borrows()
    model = sharded(mesh, stage, module, units=[module.first, module.second])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.ones(3, 128))
    assert "it is this rank's shard, of another shape. Make both one unit" in raised.value.__notes__[0]
    model.close()


def give_data(model: nn.Module) -> None:
    p = next(model.parameters())
    p.data = torch.zeros(p.shape, dtype=torch.float64)


def halve(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() / 2, model.parameters())


@torch.no_grad()
def assign(model: nn.Module) -> None:
    for p in model.parameters():
        p.set_(torch.full_like(p, 0.1))


@pytest.mark.parametrize("change", [nn.Module.double, give_data, halve, assign])
@STAGES
@world(2)
def test_what_moves_the_parameters_after_sharding_is_an_error(mesh: Mesh, stage: int, change: Any) -> None:
    """With ``set_`` and ``vector_to_parameters`` training went on with the values from before."""
    model = sharded(mesh, stage)
    moved = r"'into\.weight' (has|would have) other memory than when it was sharded"
    way_out = r"vector_to_parameters.*p\.copy_\(values\) under no_grad"
    with pytest.raises(ValueError, match=f"{moved}|{way_out}"):  # noqa: PT012
        change(model)
        loss_of(model).backward()
    model.close()


# What cannot be sharded, on all ranks.


class Named(nn.Module):
    """Has a name of its own that a sharded module needs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        setattr(self, name, "mine")


def turned() -> nn.Module:
    made = nn.Linear(3, 4)
    made.weight.data = made.weight.data.t().contiguous().t()
    return made


def with_hook() -> nn.Module:
    made = nn.Linear(3, 4)
    made.weight.register_hook(lambda gradient: gradient)
    return made


NOT_CONTIGUOUS = "'weight' cannot be sharded: it is not contiguous"
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (Stack, {"stage": 1}, "stage=1: expected 2"),
    (Stack, {"compute_dtype": torch.int8}, r"expected one of floating point, got torch\.int8"),
    (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), {}, NOT_CONTIGUOUS),
    (turned, {}, NOT_CONTIGUOUS),
    (with_hook, {}, "'weight' cannot be sharded: it has a hook"),
    (partial(Named, "group"), {}, "attribute 'group' of its own"),
    (partial(Named, "verify"), {}, "attribute 'verify' of its own"),
    (partial(nn.Embedding, 4, 2, sparse=True), {}, "'' has sparse gradients"),
    (lambda: Stack().to("meta"), {"stage": 2}, r"'into\.weight' is on the meta device"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
@world(2)
def test_arguments_that_cannot_be_meant(mesh: Mesh, make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        instep.fully_shard(make(), mesh, **options)


@world(2)
@STAGES
def test_ranks_with_other_units_or_an_optimizer_from_before_are_refused(mesh: Mesh, stage: int) -> None:
    module = filled(Stack())
    with pytest.raises(ValueError, match=r"the ranks differ in units: unit .* on rank 0, but .* on rank 1"):
        sharded(mesh, stage, module, units=[module.into] if mesh.rank else None)
    optimizer = instep.ShardedOptimizer(module.parameters(), SGD, mesh, **LOOP)
    with pytest.raises(ValueError, match=r"'into\.weight' has a ShardedOptimizer already.*first"):
        sharded(mesh, stage, module)
    assert type(module) is Stack
    optimizer.close()
    sharded(mesh, stage, module).close()


# Ranks that run other units, or fail.


@world(2)
def test_ranks_that_run_other_units_all_raise_and_name_them(mesh: Mesh) -> None:
    class Either(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layers[self.number](self.into(x)))

    model = sharded(mesh, module=Either(), find_unused_parameters=True)
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
def test_the_step_after_a_forward_that_raised_gathers_the_same_units(mesh: Mesh, stage: int) -> None:
    """In stage 2 the rank that raised gathered a unit again that the other one had kept."""
    model = sharded(mesh, stage)
    loss_of(model).backward()  # from now on units are prefetched
    AdamW(model.parameters(), fused=True).step()
    handle = model.layers[0].register_forward_pre_hook(fail) if mesh.rank else None
    with pytest.raises(ArithmeticError if mesh.rank else Desync, match=r"planted|rank 1 left"):
        loss_of(model).backward()
    if handle is not None:
        handle.remove()
    model.zero_grad()
    loss_of(model).backward()
    model.close()


# Modules from the meta device get the values that they would have had, one unit at a time.


def on_meta(kind: Callable[..., nn.Module], *arguments: object) -> nn.Module:
    with torch.device("meta"):
        return kind(*arguments)


@world(2)
def test_a_model_that_fills_its_parameters_by_name_gets_the_weights_of_one_process(mesh: Mesh) -> None:
    config = GPTConfig(layers=3, width=48, heads=2, context=8, tied=True)
    plain, module = GPT(config), on_meta(GPT, config)
    initialize(plain, seed=7)
    parameters = list(module.parameters())
    model: Any = instep.fully_shard(module, mesh)
    assert not any(p.is_meta for p in module.parameters())
    assert all(p is before for p, before in zip(module.parameters(), parameters, strict=True))
    model.materialise(seed=7)
    assert gathered_units(model) == []
    assert_same(whole(module), dict(plain.state_dict()), "values")
    tokens = torch.arange(16).view(2, 8)
    assert torch.equal(module(tokens), plain(tokens))
    model.close()


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
    model: Any = instep.fully_shard(module, mesh)
    model.materialise(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    found = whole(module)
    assert torch.equal(module.norm.running_var, torch.ones(16))
    loss_of(module).backward()
    model.close()
    group = mesh.whole.duplicate()
    for name, x in found.items():
        by_rank = group.all_gather_bytes(x.numpy().tobytes(), name)
        assert by_rank[0] == by_rank[1], name
    # The bounds of torch's own initialisation.
    assert 0.2 < found["into.weight"].abs().max() <= 12**-0.5
    assert 0.25 < found["layers.1.self_attn.in_proj_weight"].abs().max() <= (6 / (16 + 48)) ** 0.5
    assert not found["layers.0.self_attn.out_proj.bias"].any()
    assert not torch.equal(found["layers.0.linear1.weight"], found["layers.1.linear1.weight"])


class Unfillable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


@world(2)
def test_what_has_no_values_or_nothing_to_fill_it_is_named(mesh: Mesh) -> None:
    module = on_meta(Stack)
    model: Any = instep.fully_shard(module, mesh)
    with pytest.raises(ValueError, match=r"'into\.weight' was on the meta device .* materialise\(\)"):
        loss_of(module)
    model.materialise(fill)
    torch.testing.assert_close(loss_of(module), loss_of(filled(Stack())))
    model.close()
    for name, part, message in (
        ("own", on_meta(Unfillable), r"'own', a Unfillable, has parameters on the meta device"),
        ("table", torch.empty(3, device="meta"), "buffer 'table' is on the meta device"),
    ):
        module = on_meta(Stack)
        if isinstance(part, Tensor):
            module.register_buffer(name, part)
        else:
            module.add_module(name, part)
        model = instep.fully_shard(module, mesh)
        with pytest.raises(ValueError, match=message):
            model.materialise()
        model.close()


def test_a_rank_alone_computes_with_what_is_written_through_data() -> None:
    """Weights in another dtype were not cast again."""
    model = instep.fully_shard(nn.Linear(4, 4), world_of_one(), 2, compute_dtype=torch.bfloat16)
    x = torch.ones(2, 4)
    model(x)
    with instep.gathered(model):
        for p in model.parameters():
            p.data.zero_()
    assert not model(x).any()
    model.close()
