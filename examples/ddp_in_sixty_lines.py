"""Data-parallel training with nothing hidden: the idea of DistributedDataParallel, in torch alone.

    torchrun --nproc-per-node 2 examples/ddp_in_sixty_lines.py

Every rank has the whole model and its own share of the data. The replicas stay equal because they start
with the same weights (a broadcast), step with the same gradient (one all-reduce), and have the same
optimizer.
docs/mechanisms.md lists the file of instep for each further mechanism.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


class DataParallel(nn.Module):
    """``module`` on every rank. When ``backward`` returns, each ``.grad`` is the mean over the ranks."""

    def __init__(self, module: nn.Module, verify: bool = False) -> None:
        super().__init__()
        self.module = module
        num_different = torch.zeros(())
        for x in [*module.parameters(), *module.buffers()]:
            rank_0s = x.detach().clone()
            dist.broadcast(rank_0s, src=0)
            num_different += not torch.equal(rank_0s, x)
            if not verify:
                x.data.copy_(rank_0s)
        dist.all_reduce(num_different)  # all ranks raise, or none: one alone would leave the others waiting
        if verify and num_different:
            raise ValueError(
                "the ranks begin with different weights: seed them alike, or let rank 0's be taken"
            )
        self.parameters_to_train = [p for p in module.parameters() if p.requires_grad]
        self.num_arrived = 0
        for p in self.parameters_to_train:
            p.register_post_accumulate_grad_hook(self.arrived)

    def forward(self, *args: Tensor) -> Tensor:
        return self.module(*args)

    def arrived(self, parameter: Tensor) -> None:
        """Autograd calls this in the middle of backward, once the gradient of ``parameter`` is complete."""
        self.num_arrived += 1
        if self.num_arrived == len(self.parameters_to_train):  # never, if a parameter is unused
            self.num_arrived = 0
            self.reduce()

    def reduce(self) -> None:
        """One message for all gradients: its latency is paid once, but nothing is computed meanwhile."""
        gradients = [p.grad for p in self.parameters_to_train]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)  # the sum
        flat /= dist.get_world_size()
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def main(steps: int = 100) -> float:
    """Fit a line to noisy points, different ones on each rank, and return the loss over all points."""
    torch.manual_seed(dist.get_rank())  # different data and, until the broadcast, different weights per rank
    x = torch.randn(64, 8)
    y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(64, 1)
    model = DataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    loss = main()
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f} after 100 steps on {dist.get_world_size()} rank(s)")
    dist.destroy_process_group()
