"""Trains the digit network; the same seed gives the same weights."""

from pathlib import Path

import torch
from data import splits, with_noise
from model import create
from torch import nn


def train(
    output: Path,
    *,
    epochs: int = 8,
    seed: int = 0,
    batch: int = 64,
    learning_rate: float = 3e-3,
    label_noise: float = 0.0,
) -> None:
    """Train on the training split and write the state dict to `output`.

    `seed` decides the first weights and the order of the samples. It does not decide the split, so that the held-out
    data stays unseen whatever the seed. `label_noise` is the share of training labels that are drawn anew, to see what
    becomes of a model that was trained on bad data. Raises ValueError where `epochs` is below 1.
    """
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}; training needs at least 1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of floating-point sums depends on the number of threads
    try:
        torch.save(_fit(epochs, seed, batch, learning_rate, label_noise).state_dict(), output)
    finally:
        torch.set_num_threads(threads)


def _fit(epochs: int, seed: int, batch: int, learning_rate: float, label_noise: float) -> nn.Module:
    split = with_noise(splits()[0], label_noise, seed)
    images, labels = torch.from_numpy(split.images), torch.from_numpy(split.labels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create()
        steps = epochs * -(-len(labels) // batch)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
        for epoch in range(1, epochs + 1):
            total = 0.0
            for indices in torch.split(torch.randperm(len(labels)), batch):
                loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
                total += loss.item() * len(indices)
            print(f"epoch {epoch}/{epochs} loss {total / len(labels):.3f}", flush=True)
    return model.eval()


if __name__ == "__main__":
    train(Path("weights.pt"))
