"""Samples to one batch, padded or packed, and the one place where targets become the positions that predict them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill.types import TokenizedSample


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """token_ids int64 [B, L], right-padded with 0; the N targets as labels, predict_rows and samples, int64 [N].

    predict_rows index hidden states flattened to [B * L]: the token at position t is predicted at t - 1. Padding
    lies right of every target, so causal attention needs no mask for it. ``samples`` number the targets' samples.
    num_tokens counts without padding. position_ids int64 [B, L] are there if rows hold several samples: they begin
    with 0 at each, and at every token of the padding.
    """

    token_ids: Tensor
    predict_rows: Tensor
    labels: Tensor
    samples: Tensor
    num_tokens: int
    position_ids: Tensor | None = None

    def to(self, device: str) -> "TokenBatch":
        """The same batch on ``device``."""
        return TokenBatch(
            token_ids=self.token_ids.to(device),
            predict_rows=self.predict_rows.to(device),
            labels=self.labels.to(device),
            samples=self.samples.to(device),
            num_tokens=self.num_tokens,
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
        )

    def at_targets(self, outputs: Tensor) -> Tensor:
        """The rows [N, ...] of a model's outputs [B, L, ...] that predict the targets."""
        return outputs.flatten(0, 1)[self.predict_rows]


def collate(samples: Sequence[TokenizedSample], begins_row: npt.NDArray[np.bool_] | None = None) -> TokenBatch:
    """One batch of ``samples`` in their order, targets sample by sample.

    begins_row: bool [samples], whether a sample begins a row or follows the one before it in its row; the first one
    begins a row. Without it each sample has a row.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    begins = np.ones(len(samples), np.bool_) if begins_row is None else begins_row
    assert begins[0], "the first sample begins a row"
    rows = np.cumsum(begins) - 1
    before = np.cumsum(lengths) - lengths
    columns = before - before[begins][rows]
    length = int((columns + lengths).max())
    places = (rows * length + columns).tolist()
    token_ids, position_ids = np.zeros((2, (int(rows[-1]) + 1) * length), np.int64)
    for sample, place in zip(samples, places, strict=True):
        token_ids[place : place + len(sample.token_ids)] = sample.token_ids
        position_ids[place : place + len(sample.token_ids)] = np.arange(len(sample.token_ids))
    predict_rows = [place + sample.targets.astype(np.int64) - 1 for sample, place in zip(samples, places, strict=True)]
    labels = [sample.token_ids[sample.targets].astype(np.int64) for sample in samples]
    return TokenBatch(
        token_ids=torch.from_numpy(token_ids).view(-1, length),
        predict_rows=torch.from_numpy(np.concatenate(predict_rows)),
        labels=torch.from_numpy(np.concatenate(labels)),
        samples=torch.from_numpy(np.repeat(np.arange(len(samples)), [len(sample.targets) for sample in samples])),
        num_tokens=int(lengths.sum()),
        position_ids=None if begins.all() else torch.from_numpy(position_ids).view(-1, length),
    )


def token_batches(lengths: npt.NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    """Rows by falling length, cut so that rows x longest stays within ``max_tokens`` (one row at least)."""
    order = np.argsort(-lengths, kind="stable").tolist()
    batches = []
    while order:
        rows = max(1, max_tokens // int(lengths[order[0]]))
        batches.append(order[:rows])
        order = order[rows:]
    return batches
