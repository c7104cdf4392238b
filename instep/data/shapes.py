"""Small images of shapes, drawn by a program: a data set of any size, with nothing to download.

Each class has a stencil, drawn once and large. A sample is that of its class at a random place, size and
angle, in two random colours and noise:

    pixel (row, column)  --turn, scale, shift-->  a point of the stencil: how much of it is in the shape?
                                                  0: background    1: colour

An image is a pure function of (seed, its number), so any process draws any part of the data set, in any
order, and data sets of other numbers have no image in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["CLASSES", "Shapes"]

SIZE = 32  # pixels across
STENCIL = 96  # points across a stencil
REACH = 1.5  # it shows -REACH..REACH, of which a shape has about -1..1
NOISE = 12.0  # standard deviation, of 255
NUM_NOISES = 1 << 16  # pieces of a long strip, of which an image has one: to draw it would double the time
CONTRAST = 100.0  # between colour and background, in at least one of red, green and blue

Grid = NDArray[np.floating]
Mask = NDArray[np.bool_]


def polygon(corners: int, x: Grid, y: Grid, radius: float = 1.0) -> Mask:
    """Inside of the regular polygon with so many corners, one of them on top."""
    angles = [2 * math.pi * (k + 0.5) / corners for k in range(corners)]
    inner = radius * math.cos(math.pi / corners)
    return np.logical_and.reduce([x * math.sin(a) - y * math.cos(a) < inner for a in angles])


def disc(x: Grid, y: Grid, radius: float = 1.0) -> Mask:
    """Inside of a circle."""
    return x * x + y * y < radius * radius


def star(x: Grid, y: Grid) -> Mask:
    """A pentagram: what is inside of at least four of its five lines."""
    angles = [2 * math.pi * (k + 0.5) / 5 for k in range(5)]
    within = [x * math.sin(a) - y * math.cos(a) < 1.1 * math.cos(2 * math.pi / 5) for a in angles]
    return disc(x, y, 1.1) & (np.sum(within, axis=0) >= 4)


SHAPES: dict[str, Callable[[Grid, Grid], Mask]] = {
    "circle": disc,
    "square": lambda x, y: polygon(4, x, y),
    "triangle": lambda x, y: polygon(3, x, y, radius=1.1),
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),
    "star": star,
    "ring": lambda x, y: disc(x, y) & ~disc(x, y, 0.6),
    "half": lambda x, y: disc(x, y, 1.1) & (y < 0),
    "crescent": lambda x, y: disc(x, y) & ~disc(x - 0.55, y, 0.85),
    "bar": lambda x, y: (abs(x) < 0.3) & (abs(y) < 1.1),
    "frame": lambda x, y: polygon(4, x, y, 1.1) & ~polygon(4, x, y, 0.65),
}
CLASSES = tuple(SHAPES)


def _stencils() -> Grid:
    """Of every class, (num_classes, STENCIL, STENCIL): shares of 3 x 3 points that are in the shape."""
    fine = 3 * STENCIL
    along = ((np.arange(fine, dtype=np.float32) + 0.5) / fine * 2 - 1) * np.float32(REACH)
    x, y = along[None, :].repeat(fine, 0), along[:, None].repeat(fine, 1)
    masks = np.stack([inside(x, y) for inside in SHAPES.values()]).astype(np.float32)
    return masks.reshape(-1, STENCIL, 3, STENCIL, 3).mean(axis=(2, 4))


class Shapes:
    """Images of ten shapes: ``shapes[i]`` is an image, (3, 32, 32) uint8, and the number of its class.

    Two data sets of one ``seed`` have no image in common if ``first .. first + num_images`` do not meet: so
    is a part held out. Raises ``ValueError`` if there is no image, or a number is negative.

    Example:
        >>> train, held_out = Shapes(20_000), Shapes(1_000, first=20_000)
        >>> image, label = held_out[0]
        >>> image.shape, CLASSES[label]
        (torch.Size([3, 32, 32]), 'half')
    """

    def __init__(self, num_images: int, *, first: int = 0, seed: int = 0) -> None:
        if num_images < 1 or first < 0 or seed < 0:
            raise ValueError(
                f"expected num_images of at least 1, first and seed of at least 0, got {num_images}, {first} "
                f"and {seed}: images are numbered first .. first + num_images - 1"
            )
        self.num_images, self.first, self.seed = num_images, first, seed
        self._stencils = _stencils()
        strip = np.random.default_rng(seed).standard_normal(NUM_NOISES + 3 * SIZE * SIZE, dtype=np.float32)
        self._noise = strip * np.float32(NOISE)
        pixels = np.arange(SIZE, dtype=np.float32) - (SIZE - 1) / 2
        self._x, self._y = pixels[None, :], pixels[:, None]

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.num_images:
            raise IndexError(f"expected an image from 0 to {self.num_images - 1}, got {index}")
        random = np.random.default_rng((self.seed, self.first + index))
        label = int(random.integers(len(CLASSES)))
        inside = self._stencils[label].take(self._points(random))  # (SIZE, SIZE)
        background, colour = _colours(random)
        image = background + (colour - background) * inside
        image += self._noise[int(random.integers(NUM_NOISES)) :][: image.size].reshape(image.shape)
        np.minimum(np.maximum(image, 0, out=image), 255, out=image)
        return torch.from_numpy(image.astype(np.uint8)), label

    def _points(self, random: np.random.Generator) -> NDArray[np.int32]:
        """Which point of a stencil each pixel shows, (SIZE, SIZE): a turn, a size and a place."""
        turn, size, right, down = random.random(4).tolist()
        radius = SIZE * (0.2 + 0.18 * size)  # of the shape, in pixels
        room = (SIZE / 2 - radius) * 0.8
        scale = STENCIL / (2 * REACH * radius)
        sine, cosine = math.sin(2 * math.pi * turn) * scale, math.cos(2 * math.pi * turn) * scale
        x, y = self._x - room * (2 * right - 1), self._y - room * (2 * down - 1)
        rows = _in_stencil(y * cosine - x * sine)
        rows *= STENCIL
        rows += _in_stencil(x * cosine + y * sine)
        return rows


def _in_stencil(along: Grid) -> NDArray[np.int32]:
    """The row or column at a distance from the stencil's middle, or the last one."""
    along += STENCIL / 2
    np.minimum(np.maximum(along, 0, out=along), STENCIL - 1, out=along)
    return along.astype(np.int32)


def _colours(random: np.random.Generator) -> tuple[Grid, Grid]:
    """A background and a colour that differs from it, (3, 1, 1) each."""
    while True:
        background, colour = random.random((2, 3, 1, 1), dtype=np.float32) * np.float32(255)
        if abs(background - colour).max() > CONTRAST:
            return background, colour
