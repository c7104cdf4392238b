"""Buckets: flat buffers that hold the gradients of several parameters as aligned views.

    | weight of layer 3 | pad | bias of layer 3 | pad | weight of layer 2 | pad .... |
    ^ 64-byte address         ^ 64                    ^ 64                           ^ W equal slices

One message costs a fixed latency plus its bytes, so small gradients are faster together; but no byte leaves
before the last gradient of the bucket is ready. The bucket size is the choice between the two. Padding is
-0.0, the only float that leaves every other one unchanged when added to it.

A binary counter (``TreeAccumulator``) adds the micro-batch gradients of a rank as they arrive, in the order
of the sum tree: push a leaf on a stack, and while the two top entries are siblings in the tree, merge them,
left plus right. A leaf whose left sibling is on the stack needs no buffer: its gradients are accumulated
into the sibling. A leaf out of order, as in some pipeline schedules, may merge on either side. Peak memory is
log2(k) buffers for k > 1 leaves that make one node, against one for plain accumulation: 8 leaves of 1 GB take
3 GB beside the incoming gradients, and 4 GB if each leaf is rounded or observed. A range that straddles nodes
leaves more roots, and takes at most twice as many buffers; out of order, up to one per leaf.

W: number of ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

import torch
from torch import Tensor

from instep.hook import weakly
from instep.memory import align_bytes
from instep.mesh.axes import slice_length
from instep.net.process_group import Group
from instep.reduce.blocks import place
from instep.reduce.node_format import IN_FLOAT32, BucketNodes, NodeFormat, Stretch
from instep.reduce.tree import Node, Sum, are_siblings, plan_sum, side_by_side


class TreeAccumulator:
    """The partial sums of one bucket on one rank, during one step.

    A step starts with ``reset``. Each leaf is written to the buffer that ``open`` returns, then ``push``ed;
    or it is accumulated into the partial sum ``sibling_of`` it, then ``added``. At the end ``roots`` are the
    maximal subtrees of this rank's leaves. The leftmost partial sum is always in ``home``, the bucket's own
    memory, so a single root needs no copy. Leaves and sums are in the format of ``nodes``.
    """

    def __init__(
        self, home: Tensor, spare: Callable[[], Tensor], *, nodes: BucketNodes | None = None
    ) -> None:
        self.home = home
        self._nodes = nodes or BucketNodes(len(home), 1, home.dtype)
        self._spare = spare
        self.spares: list[Tensor] = []
        self.reset(0)

    def reset(self, num_leaves: int) -> None:
        """Drop all partial sums; the next leaf belongs to a tree over ``num_leaves``."""
        self.num_leaves = num_leaves
        self.roots: list[tuple[Node, Tensor]] = []
        self._free = list(self.spares)

    def open(self) -> Tensor:
        """An uninitialised buffer for the next leaf."""
        if not self.roots:
            return self.home
        if not self._free:
            self.spares.append(self._spare())
            return self.spares[-1]
        return self._free.pop()

    def push(self, leaf: int, buffer: Tensor) -> None:
        """Leaf number ``leaf`` is complete in ``buffer``, which ``open`` returned."""
        if self._nodes.rounds:
            self._nodes.round(buffer, (leaf, leaf + 1))
        if not self.roots:
            self.roots.append(((leaf, leaf + 1), buffer))
            return
        at = self._index(leaf)
        if (
            at == 0
        ):  # out of order: the leftmost root moves from ``home`` to ``buffer``, and the leaf to ``home``
            moved = self.home.clone()
            self.home.copy_(buffer)
            self.roots[0] = self.roots[0][0], buffer.copy_(moved)
            buffer = self.home
        self.roots.insert(at, ((leaf, leaf + 1), buffer))
        self._merge(at)

    def sibling_of(self, leaf: int) -> Tensor | None:
        """The partial sum that leaf number ``leaf``, the next one, may be accumulated into; None: ``open``.

        Always None if nodes are rounded, because a leaf is rounded before it is added.
        """
        at = self._index(leaf) - 1
        if at < 0 or self._nodes.rounds:
            return None
        node, value = self.roots[at]
        return value if are_siblings(node, (leaf, leaf + 1), self.num_leaves) else None

    def added(self, leaf: int) -> None:
        """Leaf number ``leaf`` has been accumulated into ``sibling_of`` it."""
        at = self._index(leaf) - 1
        (lo, _), value = self.roots[at]
        self.roots[at] = ((lo, leaf + 1), value)
        self._merge(at)

    def _index(self, leaf: int) -> int:
        """The index in ``roots`` at which ``leaf`` is inserted."""
        return bisect_left(self.roots, leaf, key=lambda root: root[0][0])

    def _merge(self, at: int) -> None:
        """Merge root ``at``, which is new, with its neighbours as far as the tree allows."""
        for i in (at - 1, at):
            if not 0 <= i < len(self.roots) - 1:
                continue
            (left, value), (right, other) = self.roots[i : i + 2]
            if are_siblings(left, right, self.num_leaves):
                node = left[0], right[1]
                self._nodes.add(value, other, node)
                self._free.append(other)
                self.roots[i : i + 2] = [(node, value)]
                self._merge(i)
                return


MEBIBYTE = 1 << 20
Caps = float | Sequence[float] | Callable[[Sequence[int]], Sequence[float]]
Leaves = tuple[Sequence[int], ...]  # by rank


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of tree nodes and messages, never narrower than float32.

    Rounding partial sums to bfloat16 only where they cross ranks would make the sum depend on the ranks.
    """
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def flat_real(x: Tensor) -> Tensor:
    """``x`` in logical order as a flat real tensor; complex numbers become pairs."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def num_real(x: Tensor) -> int:
    """Number of real elements of ``x``."""
    return x.numel() * (2 if x.dtype.is_complex else 1)


def group_by_cap(parameters: Sequence[Tensor], order: Sequence[int], caps: Caps) -> list[list[int]]:
    """Positions of ``parameters``, in ``order``, cut into buckets; one dtype and device per bucket.

    A bucket closes when it reaches its cap in MiB, as in DDP. ``caps`` is one number, a list (one per
    bucket, the last one repeated), or a callable from the byte sizes, in order, to such a list.
    """
    if callable(caps):
        caps = caps([num_real(parameters[i]) * wire_dtype(parameters[i].dtype).itemsize for i in order])
    limits = [caps] if isinstance(caps, int | float) else list(caps)
    if not limits or min(limits) <= 0:
        raise ValueError(f"bucket_cap_mb: expected positive sizes in MiB, got {limits}")
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i in order:
        kind = (wire_dtype(parameters[i].dtype), parameters[i].device)
        members, nbytes = open_groups.pop(kind, ([], 0))
        members.append(i)
        nbytes += num_real(parameters[i]) * kind[0].itemsize
        if nbytes >= limits[min(len(groups), len(limits) - 1)] * MEBIBYTE:
            groups.append(members)
        else:
            open_groups[kind] = (members, nbytes)
    return groups + [members for members, _ in open_groups.values()]


@dataclass
class Slot:
    """One parameter's place in its bucket."""

    position: int  # of the parameter, in registration order
    offset: int  # in elements of the bucket
    length: int
    shape: torch.Size
    is_complex: bool = False
    present: bool = False  # some leaf of this step, on this rank, had a gradient
    frozen: bool = False  # on this rank, at the launch of the exchange


@dataclass
class Bundle:
    """Parameters whose gradients the ranks of ``group`` add up together, and their progress in the open leaf.

    Its class is the operation: a ``Bucket`` is reduced to all ranks of the group, which may be this rank
    alone, a ``SlicedBucket`` to slices. ``places`` are those of the group among the ranks that make the step
    together, which exchange headers; None: they are the same ranks, and each leaf is on one of them.
    ``pending`` counts the parameters whose gradient of the open leaf is incomplete.
    """

    index: int
    slots: list[Slot]
    dtype: torch.dtype
    device: torch.device
    group: Group
    places: Sequence[int] | None = field(default=None, init=False)
    pending: int = field(default=0, init=False)
    is_open: bool = field(default=False, init=False)  # the open leaf is incomplete
    ready_ns: int = field(default=0, init=False)  # when the last gradient of the open leaf arrived
    nodes: BucketNodes = field(init=False, repr=False)
    # By rank, after an exchange, one bit per slot: has a gradient; is frozen.
    presence: list[int] = field(default_factory=list, init=False)
    frozen: list[int] = field(default_factory=list, init=False)
    is_full: bool = field(default=False, init=False)  # each rank of the group has all gradients

    def begin_nodes(self, *key: int) -> None:
        """Start a reduction whose nodes are rounded by random numbers of ``key``."""
        self.nodes.begin(*key)

    @property
    def num_elements(self) -> int:
        """With padding."""
        raise NotImplementedError

    @cached_property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def open(self, leaf: int, *, whole: bool = False) -> None:
        """Leaf number ``leaf`` begins: gradients wait in ``.grad`` until it is their bundle's turn."""

    def views(self, buffer: Tensor) -> list[Tensor]:
        """All slots of ``buffer``, each with the shape of its parameter, in the bundle's dtype."""
        raise NotImplementedError

    def view_of(self, position: int, buffer: Tensor) -> Tensor:
        """The slot of ``buffer`` for the parameter at ``position``, as one of ``views``."""
        return self.views(buffer)[self._numbers[position]]

    @property
    def stretches(self) -> list[Stretch]:
        """The elements of each parameter."""
        return [Stretch(slot.position, slot.offset, slot.length) for slot in self.slots]

    def flags(self) -> int:
        """One bit per slot: present in the lower half, frozen in the upper half."""
        flags = 0
        for k, slot in enumerate(self.slots):
            flags |= (slot.present | slot.frozen << len(self.slots)) << k
        return flags

    def set_flags(self, by_rank: Sequence[int]) -> None:
        """Store the ``flags`` of all ranks; those outside of the group have other parameters."""
        self.presence, self.frozen, self.is_full = [], [], True
        for at, flags in enumerate(by_rank):
            is_member = self.places is None or at in self.places
            present = flags & self.every if is_member else 0
            self.is_full &= present == self.every or not is_member
            self.presence.append(present)
            self.frozen.append(flags >> len(self.slots))

    def present_on_some(self) -> Sequence[int]:
        """The numbers of the slots that had a gradient on some rank, after an exchange."""
        numbers = range(len(self.slots))
        if self.is_full:
            return numbers
        on_some = reduce(or_, self.presence)
        return [k for k in numbers if on_some >> k & 1]

    @cached_property
    def every(self) -> int:
        """A bit for each slot."""
        return (1 << len(self.slots)) - 1

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {slot.position: k for k, slot in enumerate(self.slots)}


@dataclass
class Bucket(Bundle):
    """The gradients of some parameters, from the first leaf of a step to the reduced gradient.

    The constructor allocates memory for one leaf. In backward, between ``open`` and ``close`` of each leaf,
    gradients are written to the buffer ``leaf``, or added to it if ``adds``. After the last leaf the exchange
    reduces ``counter.roots`` to the mean gradient in ``counter.home``, down the tree of ``sum``.
    """

    nodes_format: NodeFormat = IN_FLOAT32
    parts: Sequence[Stretch] | None = None  # the elements of each parameter, if not as in ``slots``
    sum: Sum | None = field(default=None, init=False)
    leaf: Tensor | None = field(default=None, init=False)
    adds: bool = field(default=False, init=False)
    launched: bool = field(default=False, init=False)
    # Another bucket follows in each reduction, and its first barrier ends the exchange of this one (shm).
    followed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        granule = align_bytes(self.device) // self.dtype.itemsize
        end = max(slot.offset + slot.length for slot in self.slots)
        multiple = max(granule, self.nodes_format.block(self.dtype))
        self.slice_length = slice_length(end, self.group.size, multiple)
        parts = self.stretches if self.parts is None else self.parts
        self.nodes = self.nodes_format.of_bucket(
            parts, self.slice_length, self.group.size, self.dtype, self.device
        )
        self._views: dict[int, list[Tensor]] = {}
        self._leaf_numbers: dict[int, int] = {}  # of this rank's leaves in the tree, where they are others
        self._make_counter()

    @cached_property
    def num_elements(self) -> int:
        return self.slice_length * self.group.size

    @property
    def home(self) -> Tensor:
        return self.counter.home

    def view(self, slot: Slot, buffer: Tensor) -> Tensor:
        """``slot`` of ``buffer`` with the shape of its parameter, in the bucket's dtype."""
        flat = buffer[slot.offset : slot.offset + slot.length]
        if slot.is_complex:
            return torch.view_as_complex(flat.view(*slot.shape, 2))
        return flat.view(slot.shape)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """All slots of ``buffer``, made once per buffer."""
        return self._views[buffer.data_ptr()]

    def begin(self, num_leaves: int, num_attached: Callable[[Bucket], int], leaves: Leaves) -> None:
        """Start a step of ``leaves`` by rank; ``num_attached(self)`` of the parameters' ``.grad`` are views
        of ``home`` now.

        If the program holds another such view, for instance a gradient kept from an earlier step, the bucket
        moves to new memory instead of overwriting that view.
        """
        views = self._references() - self._idle_references
        if views > 0 and views > num_attached(self):
            self._views.clear()
            self._make_counter()
        self._leaf_numbers = {}
        if self.places is not None:
            own = leaves[self.places[self.group.rank]]
            leaves, num_leaves = side_by_side(leaves, self.places)
            self._leaf_numbers = dict(zip(own, leaves[self.group.rank], strict=True))
        self.sum = plan_sum(leaves, num_leaves)
        self.counter.reset(num_leaves)
        self.launched = False
        for slot in self.slots:
            slot.present = False

    def open(self, leaf: int, *, whole: bool = False) -> None:
        """Choose the memory for the gradients of leaf number ``leaf``; ``whole``: a buffer of its own."""
        counter = self.counter
        leaf = self._leaf_numbers.get(leaf, leaf)
        if not counter.roots:
            self.adds, self.leaf = False, counter.home
            return
        sibling = None if whole else counter.sibling_of(leaf)
        self.adds = sibling is not None
        self.leaf = counter.open() if sibling is None else sibling

    def close(self, leaf: int) -> None:
        """Leaf number ``leaf`` is complete."""
        assert self.leaf is not None
        leaf = self._leaf_numbers.get(leaf, leaf)
        if self.adds:
            self.counter.added(leaf)
        else:
            self.counter.push(leaf, self.leaf)
        self.leaf = None

    def _make_counter(self) -> None:
        self.counter = TreeAccumulator(self._buffer(), weakly(self._buffer), nodes=self.nodes)
        self._idle_references = self._references()

    def _buffer(self) -> Tensor:
        segment = self.group.allocate(self.nbytes, align_bytes(self.device), self.device)
        buffer = segment.elements(self.dtype).fill_(-0.0)
        self._views[buffer.data_ptr()] = [self.view(slot, buffer) for slot in self.slots]
        return buffer

    def _references(self) -> int:
        """Number of tensors that share the storage of ``home``."""
        return int(torch._C._storage_Use_Count(self.counter.home.untyped_storage()._cdata))


def make_buckets(
    parameters: Sequence[Tensor],
    members: Sequence[Sequence[int]],
    group: Group,
    *,
    nodes: NodeFormat = IN_FLOAT32,
    groups: Mapping[int, Group] | None = None,
) -> list[Bucket]:
    """Buckets for ``members``, positions in ``parameters``, every parameter at an aligned address.

    ``group`` reduces them, but those at a position in ``groups``, which another group reduces. The memory is
    allocated by the group, so that its ranks can map it where it allows that.
    """
    buckets = []
    for index, positions in enumerate(members):
        first = parameters[positions[0]]
        dtype, device = wire_dtype(first.dtype), first.device
        granule = align_bytes(device) // dtype.itemsize
        its = [parameters[position] for position in positions]
        lengths = [num_real(parameter) for parameter in its]
        offsets, _ = place(lengths, granule, block=max(granule, nodes.block(dtype)))
        slots = [
            Slot(position, offset, length, parameter.shape, parameter.dtype.is_complex)
            for position, offset, length, parameter in zip(positions, offsets, lengths, its, strict=True)
        ]
        its_group = (groups or {}).get(positions[0], group)
        buckets.append(Bucket(index, slots, dtype, device, its_group, nodes))
    for bucket in buckets[:-1]:
        bucket.followed = True
    return buckets
