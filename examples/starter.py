"""A training script to start from: a small net on made-up data, for your own model, data and loss.

python SCRIPT                      one process
instep run -n 4 SCRIPT             four; a rank that dies is replaced
torchrun --nproc-per-node 4 SCRIPT
"""

import torch
from torch import nn

import instep

# The run: its folder and its ranks, from the launcher. Everything below runs in every process.
run = instep.Run("runs/mine", checkpoint={"every": 100})

# Your data: anything with len() and data[i]. One sample is one row here: a tensor (16,) and its class.
torch.manual_seed(0)  # the same data and the same initial weights in every process
inputs = torch.randn(4096, 16)
classes = (inputs @ torch.randn(16, 5)).argmax(dim=1)
dataset = torch.utils.data.TensorDataset(inputs, classes)

# A step has 64 samples, cut into 8 micro-batches of 8. The bits of the weights depend on these two numbers,
# but not on the number of ranks that share the micro-batches.
data = instep.Loader(dataset, batch_size=64, micro_batch_size=8)

# Your model. If it is too large for a rank: instep.fully_shard(net, run.mesh).
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
model = instep.DataParallel(net, run.mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)

# All objects that a step changes, by names of your own: they are saved, and restored when a rank is lost.
run.register(model=model, optimizer=optimizer, schedule=schedule, data=data)

for step in run.steps(300):  # continues from the newest complete state
    with step:  # if a rank dies in here, all ranks retry the step
        losses = []
        for micro_batch in model.micro_batches(data):
            x, y = micro_batch.data
            loss = nn.functional.cross_entropy(model(x), y)  # no division by the number of micro-batches
            loss.backward()
            losses.append(loss.detach())
        instep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step.log(loss=instep.mean(losses))  # steps.jsonl, and a line on the terminal
