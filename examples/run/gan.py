"""Learn to draw points on a ring: a generator and a critic, each with an optimizer of its own.

instep run -n 2 gan.py
"""

import math

import torch
from torch import nn
from instep import DataParallel as DistributedDataParallel, Run

STEPS, BATCH, NOISE = 400, 128, 8


def perceptron(num_in, num_out):
    return nn.Sequential(
        nn.Linear(num_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, num_out)
    )


def ring(n):
    """n points near a circle of radius 2, in eight heaps."""
    angle = torch.randint(8, (n,)) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=1) * 2 + torch.randn(n, 2) * 0.1


run = Run("runs/gan")
torch.manual_seed(0)  # for the weights; run.steps seeds points and noise, differently on every rank

generator = DistributedDataParallel(perceptron(NOISE, 2))
critic = DistributedDataParallel(perceptron(2, 1))
g_adam = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
c_adam = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
loss_function = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

for step in run.steps(STEPS, generator=generator, critic=critic, g_adam=g_adam, c_adam=c_adam):
    with step:
        # The critic learns to tell real points from drawn ones.
        c_adam.zero_grad()
        fake = generator(torch.randn(BATCH, NOISE))
        c_loss = loss_function(critic(ring(BATCH)), ones) + loss_function(critic(fake.detach()), zeros)
        c_loss.backward()
        c_adam.step()

        # The generator learns to draw points that the critic takes for real.
        g_adam.zero_grad()
        g_loss = loss_function(critic(fake), ones)
        g_loss.backward()
        g_adam.step()

        if step % 100 == 0 and run.rank == 0:
            print(f"step {step}: losses {c_loss:.2f} of the critic, {g_loss:.2f} of the generator")

with torch.no_grad():
    radius = generator(torch.randn(1000, NOISE)).norm(dim=1)
if run.rank == 0:
    print(f"radius {radius.mean():.2f} +- {radius.std():.2f}, to be 2.00 +- 0.10")
