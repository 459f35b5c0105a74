"""The usual way: one model at a time, written with nn.Module and torch.optim, fed by a dataset that draws one sequence.

The mathematics is that of the stacked program (`same_losses` asserts it): single-head causal attention without biases
or output map, a readout MLP on the last position, AdamW, cross-entropy.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from posbias_papers.wu2025.retrieval import InContextRetrieval


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        logits = self.query(inputs) @ self.key(inputs).transpose(-2, -1) / math.sqrt(inputs.shape[-1])
        attention: Tensor = logits.masked_fill(hidden, -math.inf).softmax(dim=-1)
        return attention @ self.value(inputs)


class Transformer(nn.Module):
    def __init__(self, depth: int, width: int, *, readout: tuple[int, int], outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))
        hidden, count = readout
        sizes = [width, *[hidden] * count]
        inner = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
        self.readout = nn.Sequential(*inner, nn.Linear(sizes[-1], outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        n_positions = inputs.shape[1]
        hidden = torch.ones(n_positions, n_positions, dtype=torch.bool, device=inputs.device).triu(1)
        for layer in self.layers:
            inputs = layer(inputs, hidden)
        logits: Tensor = self.readout(inputs[:, -1])
        return logits

    def take(self, parameters: dict[str, Tensor]) -> None:
        """Begin with the weights of a member of the stacked program."""
        own = dict(self.named_parameters())
        for layer in range(len(self.layers)):
            for name in ("query", "key", "value"):
                own[f"layers.{layer}.{name}.weight"].data.copy_(parameters[f"blocks.{layer}.{name}"][0].T)
        linear = [module for module in self.readout if isinstance(module, nn.Linear)]
        for number, module in enumerate(linear):
            module.weight.data.copy_(parameters[f"readout.{number}.weight"].T)
            module.bias.data.copy_(parameters[f"readout.{number}.bias"])


class Sequences(IterableDataset[tuple[np.ndarray, int]]):
    """In-context retrieval, one sequence at a time, with NumPy."""

    def __init__(self, task: InContextRetrieval, seed: int) -> None:
        self.task = task
        self.generator = np.random.default_rng(seed)
        deviation = task.deviation
        self.centres = self.generator.normal(0, deviation, (task.classes, task.features)).astype(np.float32)
        self.label_vectors = self.generator.normal(0, deviation, (task.labels, task.features)).astype(np.float32)
        self.labels = self.generator.integers(0, task.labels, task.classes)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        while True:
            yield self.sequence()

    def sequence(self) -> tuple[np.ndarray, int]:
        task, generator = self.task, self.generator
        chosen = generator.choice(task.classes, task.distinct_classes, replace=False)
        context = generator.permutation(np.repeat(chosen, task.burstiness))
        query = context[generator.choice(task.answer_places)]
        items = np.append(context, query)
        noise = generator.standard_normal((len(items), task.features), dtype=np.float32) * task.deviation
        inputs = np.empty((task.n_positions, task.features), dtype=np.float32)
        inputs[::2] = (self.centres[items] + task.noise * noise) / np.sqrt(1 + task.noise**2)
        inputs[1::2] = self.label_vectors[self.labels[context]]
        return inputs, int(self.labels[query])


class PlainTraining:
    """One model and its loop."""

    def __init__(self, model: Transformer, task: InContextRetrieval, *, batch: int, device: torch.device) -> None:
        self.model = model.to(device)
        self.device = device
        self.batches = iter(DataLoader(Sequences(task, seed=0), batch_size=batch))
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)

    def train(self, start: int, stop: int, inputs: Tensor | None = None, targets: Tensor | None = None) -> None:
        for _ in range(start, stop):
            self.step(inputs, targets)

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """One update, on a batch of the dataset or a given one."""
        if inputs is None or targets is None:
            inputs, targets = next(self.batches)
        loss = nn.functional.cross_entropy(self.model(inputs.to(self.device)), targets.to(self.device))
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.detach()
