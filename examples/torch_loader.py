#!/usr/bin/env python3
"""A PyTorch data set in SiMM: each sample is made once for all processes, and read straight into its batch's tensor.

    python examples/torch_loader.py --samples 256 --workers 2

Making a sample is the expensive part of many data sets: decoding, tokenizing, augmenting. Here whoever needs a sample
first makes it and stores it. All others, of this epoch and the next ones, in any process, read a whole batch with one
call into the tensor that the loader returns. There is no list of samples to collate.

A loader without worker processes can make the batch with ``device="cuda"``: the values then go straight into the GPU's
memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from simm.client import Client


class Stored(Dataset[torch.Tensor]):
    """Samples of one shape and data type, by number.

    Args:
        client: any client; it goes to the loader's worker processes by itself, and reconnects there.
        name: of the data set, and of the version of ``make``.
        make: returns the sample of a number, a CPU tensor.
    """

    def __init__(
        self, client: Client, name: str, count: int, shape: Sequence[int], dtype: torch.dtype,
        make: Callable[[int], torch.Tensor],
    ) -> None:  # fmt: skip
        self._client = client
        self._name = name
        self._count = count
        self._shape = tuple(shape)
        self._dtype = dtype
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, numbers: list[int]) -> torch.Tensor:
        """Return a batch. torch calls this, if there is one, in place of ``__getitem__`` for each sample."""
        batch = torch.empty((len(numbers), *self._shape), dtype=self._dtype)
        rows = list(batch)
        keys = [f"{self._name}/{number}" for number in numbers]
        sizes = self._client.get_into_many(keys, rows)
        lost = [at for at, size in enumerate(sizes) if size != rows[at].nbytes]
        for at in lost:
            rows[at].copy_(self._make(numbers[at]))
        if lost:
            self._client.put_many([keys[at] for at in lost], [rows[at] for at in lost])
        return batch

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.__getitems__([number])[0]


def whole(batch: torch.Tensor) -> torch.Tensor:
    """Return the batch, which is a tensor already."""
    return batch


def image(number: int) -> torch.Tensor:
    """Return what stands for a decoded picture of 224 x 224 pixels."""
    draw = torch.Generator().manual_seed(number)
    time.sleep(0.002)
    return torch.randint(0, 256, (3, 224, 224), generator=draw, dtype=torch.uint8)


def main() -> None:
    """Read the data set twice, check each sample, and say what was read."""
    parser = argparse.ArgumentParser(description="A PyTorch data set in SiMM.")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0, help="processes of the loader (default 0: this one)")
    parser.add_argument("--manager", help="of a running cluster (default: a cluster of its own, with 256 MiB)")
    options = parser.parse_args()
    with Client(options.manager) if options.manager else Client.local("256M") as client:
        data = Stored(client, "images-1", options.samples, (3, 224, 224), torch.uint8, image)
        loader = DataLoader(data, options.batch, num_workers=options.workers, collate_fn=whole)
        for epoch in range(2):
            stored = sum(client.exists_many([f"images-1/{number}" for number in range(options.samples)]))
            began = time.perf_counter()
            batches = list(loader)
            seconds = time.perf_counter() - began
            wrong = sum(not torch.equal(row, image(n)) for n, row in enumerate(torch.cat(batches)))
            print(f"epoch {epoch}: {stored} of {len(data)} were stored, {seconds:.2f} s, {wrong} wrong", flush=True)


if __name__ == "__main__":
    main()
