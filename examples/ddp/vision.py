"""Tell four textures apart: a conv net on random crops and flips, on several CPUs.

torchrun --nproc-per-node 2 vision.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, NUM_IMAGES, NUM_HELD_OUT = 4, 960, 200


class Textures(Dataset):
    """Waves that run across, down, both or neither, in noise."""

    def __init__(self, num_images, seed, augment):
        torch.manual_seed(seed)
        self.labels = torch.randint(4, (num_images,))
        across, down = self.labels % 2, self.labels // 2
        rows, columns = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
        shift, width = torch.rand(2, num_images, 1, 1) * 6, 0.8 + torch.rand(num_images, 1, 1)
        waves = torch.sin(columns * width + shift[0]) * across.view(-1, 1, 1)
        waves += torch.sin(rows * width + shift[1]) * down.view(-1, 1, 1)
        self.images = (waves + 1.5 * torch.randn(num_images, 20, 20)).unsqueeze(1)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        top, left = torch.randint(5, (2,)).tolist() if self.augment else (2, 2)
        image = self.images[i, :, top : top + 16, left : left + 16]
        return image.flip(-1) if self.augment and torch.rand(()) < 0.5 else image, self.labels[i]


def convolution(num_in, num_out):
    layer = nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(num_out), nn.ReLU(), nn.MaxPool2d(2))


def main():
    dist.init_process_group("gloo")
    images = Textures(NUM_IMAGES, seed=0, augment=True)
    loader = DataLoader(images, batch_size=16, sampler=DistributedSampler(images), num_workers=1)
    net = nn.Sequential(convolution(1, 16), convolution(16, 32), nn.Flatten(), nn.Linear(32 * 16, 4))
    model = DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    x, y = next(iter(DataLoader(Textures(NUM_HELD_OUT, seed=1, augment=False), NUM_HELD_OUT)))
    right = (net(x).argmax(dim=1) == y).float().mean()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{right:.1%} of {NUM_HELD_OUT} other images are told right")


if __name__ == "__main__":
    main()
