"""Learn to draw points on a ring: a generator and a critic, each with an optimizer of its own.

    torchrun --nproc-per-node 2 gan.py
"""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, NOISE = 400, 128, 8


def perceptron(num_in, num_out):
    return nn.Sequential(
        nn.Linear(num_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, num_out)
    )


def ring(n):
    """n points near a circle of radius 2, in eight heaps."""
    angle = torch.randint(8, (n,)) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=1) * 2 + torch.randn(n, 2) * 0.1


dist.init_process_group("gloo")
torch.manual_seed(int(os.environ.get("RANK", 0)))

generator = DistributedDataParallel(perceptron(NOISE, 2))
critic = DistributedDataParallel(perceptron(2, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
loss_function = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

for step in range(STEPS):
    # The critic learns to tell real points from drawn ones.
    fake = generator(torch.randn(BATCH, NOISE))
    c_loss = loss_function(critic(ring(BATCH)), ones) + loss_function(critic(fake.detach()), zeros)
    c_optimizer.zero_grad()
    c_loss.backward()
    c_optimizer.step()

    # The generator learns to draw what the critic takes for real.
    g_loss = loss_function(critic(fake), ones)
    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()

with torch.no_grad():
    radius = generator(torch.randn(1000, NOISE)).norm(dim=1)
print(f"radius {radius.mean():.2f} +- {radius.std():.2f}, to be 2.00; losses {c_loss:.2f}, {g_loss:.2f}")
