"""The student: load, loss and statistics at target positions, export."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distill.adapters import Adapters, AdapterSpec
from distill.collate import TokenBatch
from distill.errors import InputError
from distill.fused import (
    StudentStatistics,
    dense_loss,
    dense_losses,
    dense_statistics,
    fused_loss,
    fused_losses,
    student_statistics,
)
from distill.head import NOT_CAUSAL, UNKNOWN_HEAD, find_head, hidden_states, is_causal, own_logits, packs, verified_head
from distill.losses import LossFunction, SparseTargets, Weighing
from distill.models import (
    Quantise,
    load_causal_lm,
    load_spread,
    saved_folder,
    torch_dtype,
)
from distill.placement import Spread
from distill.tokenizer import load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class StudentSpec:
    """How to load a student. ``vocab_size`` is the crop; weights that are trained are kept in fp32.

    ``precision`` is one to compute in (fp32, bf16, fp16), or the student's own weights are packed in 8bit or 4bit and
    ``adapters`` are trained.
    ``chat_template`` is the format that it is trained on, which its export takes over; None for completions only.
    Parameters whose name contains one of ``freeze_layers`` aren't trained. ``packing``: rows may hold several samples.
    With ``spread`` its layers are on several devices, and ``device`` is where batches go. ``attention`` is one of
    transformers' kinds; None takes its choice.
    """

    folder: Path
    precision: str
    device: str
    vocab_size: int
    grad_checkpointing: bool
    trust_remote_code: bool
    chat_template: str | None = None
    freeze_layers: tuple[str, ...] = ()
    packing: bool = False
    adapters: AdapterSpec | None = None
    spread: Spread | None = None
    attention: str | None = None

    @property
    def quantise(self) -> Quantise | None:
        """How the student's own weights are packed."""
        return self.precision if self.precision in ("8bit", "4bit") else None  # type: ignore[return-value]


class Student:
    """A student on its device. ``note`` is a line for the user if its head had to be run in the model's own way."""

    def __init__(self, spec: StudentSpec) -> None:
        self.model: PreTrainedModel = _load(spec)
        if spec.spread is not None:
            spec = replace(spec, device=str(self.model.get_input_embeddings().weight.device))
        self.spec = spec
        self._device_kinds = {parameter.device.type for parameter in self.model.parameters()}
        assert spec.adapters or not spec.quantise, "packed weights can't learn"
        _freeze(self.model, spec.freeze_layers)
        self._adapters = None if spec.adapters is None else Adapters(self.model, spec.adapters)
        probe = torch.arange(16, device=spec.device)[None] % spec.vocab_size
        # FlashAttention takes half precision alone; without it fp32 tells more.
        with nullcontext() if spec.attention is None else self._autocast():
            self._known_head = verified_head(self.model, spec.vocab_size, probe[:, :8]) is not None
            if not is_causal(self.model, probe):
                raise InputError(f"{spec.folder}: {type(self.model).__name__} {NOT_CAUSAL}")
            unpackable = spec.packing and not packs(self.model, probe)
        self.note = None if self._known_head else f"{spec.folder.name}: {UNKNOWN_HEAD}"
        if unpackable:
            raise InputError(
                f"packing: {spec.folder.name} ({type(self.model).__name__}) doesn't keep samples in one row apart; set"
                " it to false"
            )
        if spec.grad_checkpointing:
            if not self.model.supports_gradient_checkpointing:
                raise InputError(f"{spec.folder}: this architecture has no gradient checkpointing; grad_checkpointing")
            self.model.activation_checkpointing_enable({"use_reentrant": False})

    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def loss(
        self,
        tokens: TokenBatch,
        targets: SparseTargets,
        loss: LossFunction,
        *,
        scale: float,
        weighing: Weighing | None = None,
    ) -> Tensor:
        """``scale`` times the sum of ``loss`` over the batch's targets, float32 [], each weighed by ``weighing``."""
        with self._autocast():
            if not self._known_head:
                logits = self._own_logits(tokens)
                if weighing is not None:
                    targets = weighing.weigh(
                        targets, dense_losses(logits.detach(), targets, weighing.by), tokens.samples
                    )
                return dense_loss(logits, targets, loss, scale=scale)
            # Found anew each time: the weights may have been replaced.
            head = find_head(self.model, self.spec.vocab_size)
            hidden, targets = self._target_hidden(tokens), targets.to(str(head.weight.device))
            if weighing is not None:
                values = fused_losses(hidden, head, targets, weighing.by)
                targets = weighing.weigh(targets, values, tokens.samples.to(values.device))
            return fused_loss(hidden, head, targets, loss, scale=scale).to(self.spec.device)

    @torch.no_grad()
    def statistics(self, tokens: TokenBatch, targets: SparseTargets) -> StudentStatistics:
        """What the validation metrics need of the batch's targets."""
        with self._autocast():
            if not self._known_head:
                return dense_statistics(self._own_logits(tokens), targets)
            head = find_head(self.model, self.spec.vocab_size)
            return student_statistics(self._target_hidden(tokens), head, targets.to(str(head.weight.device))).to(
                self.spec.device
            )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model without dropout and gradient inside, as it was before behind."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    def export(self, folder: Path) -> None:
        """An ordinary Hugging Face folder, there whole or not at all, in the type of the student's precision.

        Adapters are in its folder ``adapter``, and merged into the model beside it if they are to be.
        """
        if folder.exists():
            return  # made by this run before it was killed; the same step gives the same bytes
        tokenizer = load_tokenizer(self.spec.folder, trust_remote_code=self.spec.trust_remote_code)
        if self.spec.chat_template is not None:
            tokenizer.chat_template = self.spec.chat_template
        with saved_folder(folder) as temporary:
            if self._adapters is None:
                _save_model(self.model, temporary, self.spec.precision)
            else:
                self._save_adapted(self._adapters, temporary)
            save_tokenizer(tokenizer, temporary)

    def _save_adapted(self, adapters: Adapters, folder: Path) -> None:
        adapters.save(folder / "adapter")
        if adapters.merge_into == "none":
            return
        plain = load_causal_lm(
            self.spec.folder, dtype="fp32", device="cpu", trust_remote_code=self.spec.trust_remote_code
        )
        adapters.merge(plain)
        # Merged into what was packed it is exact only in fp32.
        _save_model(plain, folder, "fp32" if self.spec.quantise else self.spec.precision)

    def _target_hidden(self, tokens: TokenBatch) -> Tensor:
        hidden = hidden_states(self.model, tokens.token_ids, position_ids=tokens.position_ids)
        return tokens.at_targets(hidden.to(tokens.token_ids.device))

    def _own_logits(self, tokens: TokenBatch) -> Tensor:
        logits = own_logits(self.model, tokens.token_ids, position_ids=tokens.position_ids)
        return tokens.at_targets(logits.to(tokens.token_ids.device))[:, : self.spec.vocab_size]

    def _autocast(self) -> AbstractContextManager[Any]:
        device = torch.device(self.spec.device).type
        precision = self.spec.precision
        if self.spec.quantise:
            precision = "fp32" if device == "cpu" else "bf16"
        if precision == "fp32":
            return nullcontext()
        contexts = ExitStack()
        for kind in {device, *self._device_kinds}:
            contexts.enter_context(torch.autocast(kind, dtype=torch_dtype(precision)))
        return contexts


def _load(spec: StudentSpec) -> "PreTrainedModel":
    if spec.spread is None:
        return load_causal_lm(
            spec.folder,
            dtype="fp32",
            device=spec.device,
            trust_remote_code=spec.trust_remote_code,
            quantise=spec.quantise,
            attention=spec.attention,
        )
    return load_spread(
        spec.folder,
        spec.spread,
        quantise=spec.quantise,
        trust_remote_code=spec.trust_remote_code,
        attention=spec.attention,
    )


def _freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Take the gradient from parameters with one of ``parts`` in their name, tied ones under any of their names.

    InputError for one that is in none.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for part in parts:
        named = [parameter for name, parameter in parameters.items() if part in name]
        if not named:
            near = difflib.get_close_matches(part, sorted(_name_parts(parameters)), n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; they look like {next(iter(parameters))}"
            raise InputError(f"freeze_layers: {part!r} is in no parameter's name{hint}")
        for parameter in named:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise InputError("freeze_layers: it leaves nothing of the student to train; name fewer parts")


def _name_parts(names: Iterable[str]) -> set[str]:
    """Names, and all that begins and ends at a dot in them."""
    found = set()
    for name in names:
        words = name.split(".")
        found |= {".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    return {part for part in found if not part.isdigit()}


def _save_model(model: "PreTrainedModel", folder: Path, dtype: str) -> None:
    kind = torch_dtype(dtype)
    # Tied weights are one tensor, and have to stay one: transformers writes those that share memory once.
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    weights = {
        name: cast.setdefault((t.data_ptr(), t.shape), t.to(kind)) if t.is_floating_point() else t
        for name, t in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=weights)
    # transformers writes the type of the live weights; the file has another.
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(kind).removeprefix("torch.")}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
