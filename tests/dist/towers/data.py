"""Images that are made of their numbers: the same for any number of ranks."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from towers.family import CHANNELS, CLASSES, PATCH

HELD_OUT = 1_000_000  # the number of the first held-out image


@dataclass(frozen=True)
class Pictures:
    """Images as patches [B, P, CHANNELS · PATCH], their classes [B, CLASSES], and their numbers in the run.

    The numbers are plain, so that noise can be drawn of them; held-out images have fixed times.
    """

    images: torch.Tensor
    classes: torch.Tensor
    numbers: tuple[int, ...]
    times: tuple[float, ...] | None = None

    @property
    def num_units(self):
        return len(self.numbers)

    def split(self, size):
        starts = range(0, len(self.numbers), size)
        return [
            replace(
                self,
                images=self.images[start : start + size],
                classes=self.classes[start : start + size],
                numbers=self.numbers[start : start + size],
                times=self.times and self.times[start : start + size],
            )
            for start in starts
        ]

    def to(self, device):
        return replace(self, images=self.images.to(device), classes=self.classes.to(device))


def pictures(numbers, size, times=None):
    """Waves whose direction is the class and whose phase is the image's."""
    rows, columns = np.mgrid[0:size, 0:size] / size
    images = []
    for number in numbers:
        angle, phase = 2 * np.pi * (number % CLASSES) / CLASSES, np.random.default_rng(number).random(CHANNELS)
        wave = rows * np.cos(angle) + columns * np.sin(angle)
        image = np.sin(2 * np.pi * (wave + phase[:, None, None]))  # [CHANNELS, size, size]
        images.append(image.reshape(CHANNELS, size // 2, 2, size // 2, 2).transpose(1, 3, 0, 2, 4).reshape(-1, 12))
    classes = np.eye(CLASSES)[[number % CLASSES for number in numbers]]
    as_tensor = [torch.from_numpy(np.asarray(array, np.float32)) for array in (np.stack(images), classes)]
    assert as_tensor[0].shape[-1] == CHANNELS * PATCH
    return Pictures(*as_tensor, tuple(numbers), times)


class Loader:
    """The images in order, without end; a step takes the next `global_batch_size` of them, a rank its slice."""

    def __init__(self, size, *, global_batch_size, rank, degree):
        self._size, self._batch, self._consumed = size, global_batch_size, 0
        self._own = range(rank * global_batch_size // degree, (rank + 1) * global_batch_size // degree)

    def __iter__(self):
        while True:
            first = self._consumed
            self._consumed += self._batch
            yield pictures([first + number for number in self._own], self._size)

    def state_dict(self):
        return {"consumed_samples": self._consumed, "image_size": self._size}

    def load_state_dict(self, state):
        self._consumed = state["consumed_samples"]


class HeldOutPictures:
    """Batches of held-out images, as many on each rank, at times from 1/8 to 7/8."""

    def __init__(self, size, *, local_batch_size, num_batches, rank, degree):
        self._size, self._local, self._num, self._rank, self._degree = size, local_batch_size, num_batches, rank, degree

    def __iter__(self):
        for batch in range(self._num):
            first = (batch * self._degree + self._rank) * self._local
            numbers = range(HELD_OUT + first, HELD_OUT + first + self._local)
            yield pictures(numbers, self._size, tuple((number % 7 + 1) / 8 for number in numbers))
