"""Samples to one padded batch, and the one place where targets become the positions that predict them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.types import TokenizedSample


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """token_ids int64 [B, L], right-padded with 0; the N targets as labels and predict_rows, both int64 [N].

    predict_rows index hidden states flattened to [B * L]: the token at position t is predicted at t - 1. Padding
    lies right of every target, so causal attention needs no mask for it.
    """

    token_ids: Tensor
    predict_rows: Tensor
    labels: Tensor

    def to(self, device: str) -> "TokenBatch":
        """The same batch on ``device``."""
        return TokenBatch(self.token_ids.to(device), self.predict_rows.to(device), self.labels.to(device))

    @property
    def samples(self) -> Tensor:
        """int64 [N]: the row of each target's sample."""
        return self.predict_rows // self.token_ids.shape[1]


def collate(samples: Sequence[TokenizedSample]) -> TokenBatch:
    """One batch of ``samples`` in their order, targets sample by sample."""
    length = max(len(sample.token_ids) for sample in samples)
    token_ids = np.zeros((len(samples), length), np.int64)
    for row, sample in enumerate(samples):
        token_ids[row, : len(sample.token_ids)] = sample.token_ids
    rows = [row * length + sample.targets.astype(np.int64) - 1 for row, sample in enumerate(samples)]
    labels = [sample.token_ids[sample.targets].astype(np.int64) for sample in samples]
    return TokenBatch(*(torch.from_numpy(array) for array in (token_ids, np.concatenate(rows), np.concatenate(labels))))


def token_batches(lengths: npt.NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    """Rows by falling length, cut so that rows x longest stays within ``max_tokens`` (one row at least)."""
    order = np.argsort(-lengths, kind="stable").tolist()
    batches = []
    while order:
        rows = max(1, max_tokens // int(lengths[order[0]]))
        batches.append(order[:rows])
        order = order[rows:]
    return batches
