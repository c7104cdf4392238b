"""What has to be the same on all ranks: compared before anything changes, or taken from the first rank.

*Is it the same model?* Two ranks whose layers of the same shape are registered in another order would average
the gradient of one with that of the other, and nothing later could tell. So names, order, shapes, dtypes and
requires_grad are compared. So are the options, because ``ordered=False`` on one rank alone would start
another collective than the others have started.

*The first rank's values*: of parameters and buffers at construction, and of buffers once per step, after the
gradients. Running statistics differ between ranks, since each has seen other samples; DDP lets rank 0's win
before each forward, and sends all buffers for that. Here they are sent only if they differ, in one message,
and only bits that differ are written.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from instep.errors import warn
from instep.memory import as_bytes
from instep.net.agree import first_difference, raise_on_all, require_same_lines
from instep.net.process_group import Group
from instep.state.hash import tensor_digest
from instep.state.homes import shape_of
from instep.step.parameter_registry import ParameterRegistry

T = TypeVar("T")
BROADCAST = "the broadcast of buffers"


def agree_on_structure(module: nn.Module, options: Mapping[str, object], group: Group) -> None:
    """Check that every rank of ``group`` has the same ``options``, and the same parameters and buffers in the
    same order. Collective.

    Raises:
        ValueError: they differ; on every rank, naming the first difference.
    """
    named = module.named_parameters()
    lines = [f"parameter {_describe(name, p)}, requires_grad={p.requires_grad}" for name, p in named]
    lines += [f"buffer {_describe(name, b)}" for name, b in module.named_buffers()]
    require_same_lines(group, "models", lines, fix=": build the same modules in the same order")
    lines = [f"{name}={value!r}" for name, value in options.items()]
    require_same_lines(group, "options", lines, fix=": pass the same ones on every rank")


def compare_threads(module: nn.Module, group: Group) -> None:
    """Warn on the group's first rank if ranks have other numbers of threads per operator. Collective.

    Kernels of a CPU add in another order with another number, so a micro-batch has other bits there.
    """
    mine = torch.get_num_threads().to_bytes(8, "little")
    by_rank = group.all_gather_bytes(mine, "the comparison of threads")
    lines = [[f"{int.from_bytes(data, 'little')} threads"] for data in by_rank]
    difference = first_difference(lines, group.ranks)
    if difference and group.rank == 0 and any(p.device.type == "cpu" for p in module.parameters()):
        warn(
            f"ranks compute with {difference}: the bits of a declared step depend on which rank has which "
            "micro-batch. Call torch.set_num_threads with the same number on every rank, or set "
            "OMP_NUM_THREADS",
        )


def agree_on_values(module: nn.Module, group: Group) -> None:
    """Check that every rank of ``group`` has the same bits in every parameter and buffer. Collective.

    Raises:
        ValueError: they differ; on every rank, naming the first parameter or buffer and the odd ranks.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    mine = b"".join(tensor_digest(x) for _, x in tensors)
    by_rank = group.all_gather_bytes(mine, "the comparison of values")
    for i, (name, _) in enumerate(tensors):
        digests = [data[32 * i : 32 * i + 32] for data in by_rank]
        odd = [rank for rank, digest in zip(group.ranks, digests, strict=True) if digest != digests[0]]
        if odd:
            problem = (
                f"{name!r} has other values on rank {', '.join(map(str, odd))} than on {group.ranks[0]}: "
                "load the same checkpoint everywhere, or pass init_sync=True to take rank 0's values"
            )
            raise_on_all(group, ValueError(problem))


def broadcast_values(module: nn.Module, group: Group, *, but: Container[int] = ()) -> None:
    """Overwrite every parameter and buffer with those of the group's first rank. Collective.

    Those with an identity in ``but`` are left alone, and those on the meta device, which have no values.
    """
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if id(x) in but or x.is_meta:
            continue
        mine = as_bytes(x)  # backends know some dtypes and not others
        value = mine.clone()
        if value.numel():
            group.broadcast(value, f"the broadcast of {name!r}")
        if not torch.equal(value, mine):
            x.detach().copy_(value.view(x.dtype).view(x.shape))


class SharedBuffers:
    """The buffers of a module on all ranks of ``group``: the first rank's, sent in steps where they differ.

    Most buffers are the same on all ranks: position ids, causal masks, rotary tables. So each rank sends a
    checksum of its buffers with its last bucket, and where all are equal nothing follows. The checksum is of
    the bytes, since no version counter moves where ``.data``, numpy or a kernel writes; it takes a
    millisecond for 6 MB. Buffers on a GPU would have to be fetched for it, and are sent in every step.

    At the end of a step: ``checksum``, which goes with the last bucket; then ``differ``, with those of all
    ranks, and ``exchange`` if they do.
    """

    def __init__(self, registry: ParameterRegistry, group: Group) -> None:
        self.module, self.group = registry.module, group
        self._registry = registry
        self._buffers: list[tuple[str, Tensor]] = []  # of this step

    def checksum(self) -> int:
        """32 bits for the names, shapes and dtypes of this rank's buffers, then 31 bits for their values."""
        self._buffers, self._on_device = [], False
        for _, module in self._registry.named_modules:
            if module._buffers:
                break
        else:
            return 0
        self._buffers = [(name, x) for name, x in self.module.named_buffers() if not x.is_meta]
        values = 0
        for _, x in self._buffers:
            if x.is_cpu:
                values = zlib.crc32(as_bytes(x).numpy().data, values)
            else:
                self._on_device = True
        return zlib.crc32("\n".join(self._lines()).encode()) << 31 | values >> 1

    def differ(self, checksums: Sequence[int]) -> bool:
        """Whether to ``exchange``; the same on all ranks."""
        return len(set(checksums)) > 1 or self._on_device

    def exchange(self, checksums: Sequence[int]) -> None:
        """Take the first rank's values. Collective.

        A buffer may have been saved by a forward whose backward is still to come: the second of two losses,
        or of two forwards. Written in place, that backward would compute with numbers its forward never saw.
        So a buffer that a graph holds is replaced by a new tensor, and the graph keeps the old one.

        Raises:
            ValueError: the ranks have other buffers; on all, naming the first difference.
        """
        if len({checksum >> 31 for checksum in checksums}) > 1:
            fix = ": where each rank makes buffers of its own, pass broadcast_buffers=False"
            require_same_lines(self.group, "buffers", self._lines(), fix=fix)
        by_device: dict[torch.device, list[Tensor]] = {}
        for _, x in self._buffers:
            if x.numel():
                by_device.setdefault(x.device, []).append(x)
        new: dict[Tensor, Tensor] = {}
        for buffers in by_device.values():
            message = torch.cat([as_bytes(x) for x in buffers])
            self.group.broadcast(message, BROADCAST)
            for x, part in zip(buffers, message.split([x.nbytes for x in buffers]), strict=True):
                if not torch.equal(part, as_bytes(x)):  # never on the first rank
                    values = part.clone().view(x.dtype).view(x.shape)
                    new[x] = torch.empty_like(x).copy_(values)  # with the strides that it has elsewhere
        held = {x for x in new if _is_held_by_a_graph(x)}
        for owner in self.module.modules() if held else ():
            for name, mine in owner._buffers.items():
                if mine is not None and mine in held:
                    owner._buffers[name] = new[mine]
        for x in new.keys() - held:
            x.detach().copy_(new[x])

    def _lines(self) -> list[str]:
        return [f"buffer {_describe(name, x)}, on {x.device.type}" for name, x in self._buffers]


def _describe(name: str, x: Tensor) -> str:
    return f"{name!r}, shape {tuple(shape_of(x))}, {str(x.dtype).removeprefix('torch.')}"


def _is_held_by_a_graph(buffer: Tensor) -> bool:
    """Whether something beside Python holds the tensor itself; views of it hold its storage too.

    Who has a view sees what is written, and if that is a graph, its backward raises.
    """
    # The tensor is one user of its storage, the object made to ask is another.
    shared = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > 2
    return buffer._use_count() > 1 and not shared  # type: ignore[attr-defined]
