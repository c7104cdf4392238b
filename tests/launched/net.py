"""A net with dropout, a schedule, clipped gradients and a loader, as a run of any kind of ranks."""

import argparse

import torch
from torch import nn

import instep

words = argparse.ArgumentParser(description=__doc__)
words.add_argument("--wrap", default="plain")
words.add_argument("--steps", type=int, default=12)
words.add_argument("--fail", default="", help="what rank 1 does after the backward of step 4")
args = words.parse_args()

run = instep.Run("runs/mine", checkpoint={"every": 3})
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
if args.wrap == "1":
    model = instep.DataParallel(net, run.mesh)
    optimizer = instep.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
elif args.wrap == "meta":
    first = net.state_dict()  # the same bits as with the others
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    model = instep.fully_shard(net, run.mesh)
    model.materialise(lambda name, p: p.copy_(first[name]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
else:
    model = instep.fully_shard(net, run.mesh) if args.wrap == "3" else instep.DataParallel(net, run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
samples = [(torch.randn(6), torch.randn(3)) for _ in range(20)]
data = instep.Loader(samples, batch_size=12, micro_batch_size=2, seed=0)
plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=args.steps + 1)
for step in run.steps(args.steps, model=model, optimizer=optimizer, plan=plan, data=data):
    with step:
        losses = []
        for x, y in model.micro_batches(data):
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.detach())
        if args.fail and step == 4 and run.rank == 1:
            exec(args.fail)
        instep.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        plan.step()
        optimizer.zero_grad()
        step.log(loss=instep.mean(losses))
print(f"rank {run.rank} of {run.world_size}")
