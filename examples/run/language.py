"""Predict the next byte of Python's own source: a small transformer, with warm-up and clipped gradients.

instep run -n 2 language.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from instep import DataParallel as DistributedDataParallel, Run

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--context", type=int, default=48)
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()


class Transformer(nn.Module):
    def __init__(self, width=64, layers=2, heads=4, dropout=0.1):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(args.context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(args.context))

    def forward(self, x):
        h = self.bytes(x) + self.places.weight[: x.shape[1]]
        return self.head(self.layers(h, mask=self.mask, is_causal=True))


def random_batch(text):
    """Random windows of the text, and the same windows one byte later."""
    starts = torch.randint(len(text) - args.context, (args.batch,))
    windows = torch.stack([text[i : i + args.context + 1] for i in starts]).long()
    return windows[:, :-1], windows[:, 1:]


run = Run("runs/language")
torch.manual_seed(1234)  # for the weights; run.steps seeds the windows, differently on every rank

library = Path(argparse.__file__).parent
source = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "typing.py"))
text = torch.frombuffer(bytearray(source), dtype=torch.uint8)

model = DistributedDataParallel(Transformer())
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps - 10)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[10])

for step in run.steps(args.steps, model=model, optimizer=optimizer, schedule=schedule):
    with step:
        x, y = random_batch(text)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if run.rank == 0 and step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
