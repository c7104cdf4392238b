"""A small convolutional network for images, with the normalisation as a choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from instep.models.weights import fill_normal

__all__ = ["SmallConvNet"]

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(num_groups=8, num_channels=channels),
}


class SmallConvNet(nn.Module):
    """Images (B, C, H, W) to logits (B, num_classes).

    A convolution for each of ``widths``, its number of channels, after which H and W are halved; then the
    mean over what is left of the image.

    ``norm="group"`` normalises each image by itself. ``norm="batch"`` normalises by the micro-batch and keeps
    running statistics in buffers that forward changes; declared steps apply them in micro-batch order, so
    that they have the same bits on any number of ranks, too.

    Nothing in it is random, so it declares no blocks. Raises ``ValueError`` for an unknown norm.
    """

    def __init__(
        self,
        num_classes: int = 10,
        channels: int = 3,
        norm: str = "batch",
        *,
        widths: Sequence[int] = (32, 64),
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"expected norm to be one of {', '.join(NORMS)}, got {norm!r}")
        layers: list[nn.Module] = []
        for num_in, num_out in pairwise((channels, *widths)):
            # no bias: the norm's own takes its place
            layers += [nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)]
            layers += [NORMS[norm](num_out), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.out = nn.Linear(widths[-1], num_classes)
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                self.init_parameter(name, parameter, torch.default_generator)

    def forward(self, images: Tensor) -> Tensor:
        features = self.features(images)  # (B, widths[-1], H / 4, W / 4) for two widths
        return self.out(features.mean(dim=(2, 3)))

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill ``parameter`` in place: norms the identity, biases zero, weights N(0, 2 / fan_in).

        Source: K. He et al., "Delving deep into rectifiers", ICCV 2015, section 2.2.
        """
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            fan_in = parameter[0].numel()
            fill_normal(parameter, (2 / fan_in) ** 0.5, generator)
