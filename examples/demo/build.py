"""Rebuild the embedded demo: text, tokenizer, teacher and student.

python examples/demo/build.py --out examples/demo
"""

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import grammar
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 7
TRAIN, VALIDATION = 2400, 150
TEACHER_READS = 20_000  # samples, the training text among them: a teacher knows more than its student will ever read
VOCABULARY = 2800
PAD, BOS, EOS, START, END = "<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Sample = grammar.Turns | str


def split() -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Training text, validation text and what only the teacher reads: no sample is in two of them."""
    stream = grammar.samples(SEED)
    return tuple(list(itertools.islice(stream, n)) for n in (TRAIN, VALIDATION, TEACHER_READS - TRAIN))


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE; every sequence starts with one BOS, from the template or, for plain text, by itself."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def encode(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[int]:
    """Token ids of one sample as the models see it: a completion ends with EOS, a turn with <|im_end|>."""
    if isinstance(sample, str):
        return [*tokenizer(sample).input_ids, tokenizer.eos_token_id]
    messages = [{"role": role, "content": content} for role, content in sample]
    return tokenizer.apply_chat_template(messages, return_dict=False)


def make_model(tokenizer: PreTrainedTokenizerFast, *, width: int, layers: int, seed: int) -> LlamaForCausalLM:
    """A random Llama with heads of 32 and tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]
    return model


def batches(sequences: list[list[int]], size: int, rng: random.Random) -> Iterator[torch.Tensor]:
    """Shuffled batches of sequences of similar length: token ids int64 [size, L], right-padded with 0."""
    jitter = {id(ids): len(ids) + 8 * rng.random() for ids in sequences}
    ordered = sorted(sequences, key=lambda ids: jitter[id(ids)])
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    rng.shuffle(groups)
    for group in groups:
        yield torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in group], batch_first=True)


def train(model: LlamaForCausalLM, sequences: list[list[int]], *, lr: float, size: int) -> None:
    """One pass over the sequences with AdamW: short warm-up, then a cosine to zero; the loss counts every token."""
    steps = math.ceil(len(sequences) / size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for step, ids in enumerate(batches(sequences, size, random.Random(SEED)), start=1):
        logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}/{steps}: loss {loss.item():.3f}", flush=True)


@torch.inference_mode()
def uncertainty(model: LlamaForCausalLM, sequences: list[list[int]]) -> dict[str, float]:
    """Means over all predicted tokens: cross-entropy and entropy in nats, mass of the 50 likeliest tokens."""
    rows = []
    for ids in sequences:
        logprobs = model(input_ids=torch.tensor([ids[:-1]])).logits[0].float().log_softmax(-1)
        probs = logprobs.exp()
        surprise = -logprobs[range(len(ids) - 1), ids[1:]]
        rows.append(torch.stack([surprise, -(probs * logprobs).sum(-1), probs.topk(50).values.sum(-1)]))
    means = torch.cat(rows, dim=1).mean(dim=1).tolist()
    return dict(zip(("cross_entropy", "entropy", "top50_mass"), means, strict=True))


def main() -> None:
    """Write every product of the demo into a folder and check that the teacher is worth listening to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    torch.set_num_threads(2)  # a fixed number: the same sums in the same order on every run

    training, validation, further = split()
    (out / "train.jsonl").write_text(grammar.jsonl(training))
    (out / "validation.jsonl").write_text(grammar.jsonl(validation))
    texts = [text for sample in training for text in ([sample] if isinstance(sample, str) else map("\n".join, sample))]
    tokenizer = make_tokenizer(texts)

    student = make_model(tokenizer, width=128, layers=2, seed=SEED + 1)
    student.save_pretrained(out / "student")
    teacher = make_model(tokenizer, width=192, layers=4, seed=SEED)
    train(teacher, [encode(tokenizer, sample) for sample in training + further], lr=3e-3, size=16)
    teacher.to(torch.bfloat16).save_pretrained(out / "teacher")
    for name in ("teacher", "student"):
        tokenizer.save_pretrained(out / name)

    teacher = LlamaForCausalLM.from_pretrained(out / "teacher", dtype=torch.float32).eval()
    figures = uncertainty(teacher, [encode(tokenizer, sample) for sample in validation])
    print(figures, f"{time.perf_counter() - start:.0f} s")
    assert figures["entropy"] >= 1.0 and figures["top50_mass"] <= 0.98, "this teacher knows too much"


if __name__ == "__main__":
    main()
