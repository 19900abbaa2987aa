"""Every key, declared once: its section, type, range, default, unit, doc, short flag, and what it decides."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from distill.config.keys import MAX_INT, Section, key
from distill.config.kinds import (
    PROMPT_PARTS,
    Count,
    Device,
    Exponent,
    LossName,
    MemoryByDevice,
    Momentum,
    Natural,
    NonNegative,
    Optimizer,
    PathText,
    PathTexts,
    Positive,
    PromptFormat,
    Scheduler,
    StudentInit,
    Tail,
)


class Paths(Section):
    """Where things are. Relative paths count from the file's folder, on the command line from the working directory."""

    title: ClassVar = "Paths"

    cache_folder: PathText = key("cache", "Folder of the cache, the students and the runs.", flag="-c")
    dataset_path: PathText | PathTexts | None = key(
        None, "Training text: a file, a folder, a dataset id (owner/name), or a list of them.", flag="-d"
    )
    validation_dataset_path: PathText | PathTexts | None = key(
        None, "Validation text; without it a part of the training text is held out.", flag="-vd"
    )
    teacher_models_folder: PathText | None = key(None, "Folder of teacher models, or of just one.", flag="-tm")
    student_path: PathText | None = key(
        None, "Student model: a folder, or a model id of the hub (owner/name).", flag="-s", decides="result"
    )
    student_init: StudentInit | None = key(
        None,
        'A new student in place of student_path: {"from": FOLDER, "layers": N} keeps layers of a model (and with'
        ' "hidden" and "intermediate" a part of its width), {"config": FOLDER or object, "layers": N, "hidden": N,'
        ' "heads": N, ...} makes an architecture with random weights.',
        decides="result",
    )


class Cache(Section):
    """How the teacher's records are stored."""

    title: ClassVar = "Cache Settings"

    max_cache_size_gb: Annotated[float, Field(gt=0, le=1e9)] = key(
        10.0, "Most that the cached dataset may take on disk.", unit="GB of 10^9 bytes", flag="-maxgb"
    )
    cache_precision: Literal["exact", "compact"] = key(
        "compact",
        "How logprobs are stored: exact in half precision, or compact in less than half the bytes.",
        decides="layer",
    )
    shard_targets: Count = key(8192, "Size at which a shard is closed.", unit="targets")
    epochs_per_round: Literal[1] | Literal["all"] = key(
        1,
        "Epochs trained on a part of the text before the next part is collected, where the cap holds only parts:"
        " 1 sees all text before any repeats and collects it in each epoch, all collects it once.",
        decides="result",
    )
    overlap_rounds: bool | None = key(
        None,
        "Collect the next part while one is trained on; null does so where teacher and student are on other devices.",
    )


class Pipeline(Section):
    """What a run does, and with which data."""

    title: ClassVar = "Pipeline Settings"

    ignore_model_type: bool = key(
        False, "Let completion teachers score conversations, and instruct teachers completions.", decides="result"
    )
    rebase_dataset: bool = key(
        False, "Give cached records to the same text as it is tokenised now, paired by order (needs --yes)."
    )
    use_teachers: bool = key(True, "Collect with teachers; false trains from the cache alone.")
    allow_downloads: bool = key(False, "Let dataset ids of the Hugging Face hub be downloaded.")
    validation_fraction: Annotated[float, Field(gt=0, le=0.5)] = key(
        0.02, "Part of the samples held out when there is no validation text.", decides="result"
    )
    seed: Natural = key(0, "Seed of everything random.", decides="result")
    trust_remote_code: bool = key(False, "Run the code that a model folder brings along.")


class Model(Section):
    """What teacher and student see of the text, and what of it is learned."""

    title: ClassVar = "Model Settings"

    context_len: Annotated[int, Field(ge=2, le=MAX_INT)] = key(
        2048, "Context length to collect and train on.", unit="tokens", flag="-ctx", decides="result"
    )
    save_sys_range: bool = key(False, "Learn the content of system turns.", decides="result")
    save_user_range: bool = key(False, "Learn the content of user turns.", decides="result")
    save_assistant_range: bool = key(True, "Learn the content of assistant turns.", decides="result")
    train_turn_end: bool = key(True, "Learn the token that ends a turn or a text.", decides="result")
    long_samples: Literal["auto", "chunk", "truncate", "drop"] = key(
        "auto",
        "What is done with samples over context_len; auto chunks completions and truncates conversations.",
        decides="result",
    )
    crop_distr_to_size: Count | None = key(
        None,
        "Ids from here on are masked; null takes the smaller vocabulary of teacher and student.",
        unit="ids",
        decides="layer",
    )
    enable_topK: bool = key(  # noqa: N815 - the name that users of the ancestor know
        True, "Keep only the save_topK likeliest ids of a distribution; false keeps all.", decides="layer"
    )
    save_topK: Count = key(64, "Ids kept of a distribution.", unit="ids", flag="-topk", decides="layer")  # noqa: N815
    device: Device | None = key(
        None, "Device of teacher and student, such as cpu or cuda:0; null takes the first GPU, else the CPU."
    )


class Collection(Section):
    """How the teacher is run."""

    title: ClassVar = "Collection Settings"

    num_inference_workers: Annotated[int, Field(ge=1, le=64)] = key(1, "Processes that run the teacher.", flag="-niw")
    reserve_vram: tuple[NonNegative, ...] | None = key(
        None, "Memory left free on each GPU while collecting, in the GPUs' order.", unit="GB"
    )
    teacher_weights: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = key(
        {}, "Weight of each teacher by its folder's name; those not named weigh 1, 0 leaves one out.", decides="result"
    )
    teacher_dtype: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto",
        "Number format the teacher computes in; auto is the one it was saved in on a GPU, and fp32 on a CPU.",
        decides="layer",
    )
    head_dtype: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "Number format of the teacher's output layer; auto is that of the teacher.", decides="layer"
    )
    seq_chunk_len: Count | None = key(
        None, "Tokens that the teacher reads of a sample at a time; null reads it whole.", unit="tokens"
    )
    threads_per_worker: Count | None = key(
        None, "CPU threads of a worker; null shares the cores out, at most OMP_NUM_THREADS each.", unit="threads"
    )
    collect_tokens_per_batch: Count = key(4096, "Size of a teacher batch, padding included.", unit="tokens")


class Training(Section):
    """How the student is trained."""

    title: ClassVar = "Training Settings"

    num_epochs: Count | Literal["auto"] = key(
        1,
        "Times that the training text is seen; auto is as many as max_steps takes.",
        unit="epochs",
        flag="-ne",
        decides="result",
    )
    max_steps: Count | None = key(
        None,
        "Most optimizer steps, for which the schedule is made; null takes all.",
        unit="steps",
        decides="result",
        aliases=("optimization.iterations",),
    )
    num_warmup_steps: Natural = key(
        0,
        "Warm-up of the learning rate.",
        unit="steps",
        flag="-nws",
        decides="result",
        aliases=("warmup_steps", "lr_scheduler.warmup_steps", "lr_scheduler.num_warmup_steps"),
    )
    batch_size: Count = key(
        4,
        "Size of a micro-batch where max_tokens_per_batch is null; with packing its rows.",
        unit="samples",
        flag="-bs",
        decides="result",
    )
    max_tokens_per_batch: Count | None = key(
        None,
        "Size of a micro-batch in place of batch_size: as many samples as fit, padding included, one at least.",
        unit="tokens",
        decides="result",
    )
    packing: bool = key(
        False,
        "Fill rows up to the longest sample's length with other samples, unseen by each other, instead of padding.",
        decides="result",
    )
    grad_accum_batches: Count = key(
        1,
        "Micro-batches in a step.",
        flag="-g",
        decides="result",
        aliases=("optimization.acc_steps",),
    )
    student_device: Device | None = key(None, "Device of the student where that isn't device.")
    grad_checkpointing: bool = key(False, "Save memory by computing activations again in the backward pass.")
    loss: LossName | dict[LossName, NonNegative] = key(
        "kl",
        "What is learned of the teacher's distribution, or ce of the text alone; an object mixes several by weight.",
        decides="result",
        aliases=("criterion",),
    )
    tail: Tail = key(
        "bucket",
        "Mass outside the kept ids: one outcome more (bucket), as if there were none (renormalise), or, of kl alone,"
        " left out (drop) or given to the real token (to_target).",
        decides="result",
        aliases=("loss.tail",),
    )
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = key(
        0.5, "Weight of the teacher in jsd's mixture.", decides="result", aliases=("loss.jsd_beta",)
    )
    skew_alpha: Annotated[float, Field(ge=0, lt=1)] = key(
        0.1,
        "Part of the first distribution in the second one of the skewed losses.",
        decides="result",
        aliases=("loss.skew_alpha",),
    )
    ab_alpha: Exponent = key(0.2, "Exponent of the teacher in ab.", decides="result", aliases=("loss.ab_alpha",))
    ab_beta: Exponent = key(0.7, "Exponent of the student in ab.", decides="result", aliases=("loss.ab_beta",))
    ce_weight: NonNegative = key(0.0, "Weight of the text's cross-entropy, added to the loss.", decides="result")
    ce_below_entropy_quantile: Annotated[float, Field(ge=0, le=1)] = key(
        0.0,
        "Part of the targets, those where the teacher is surest, that learn the text alone; reads the cache once more.",
        decides="result",
    )
    temperature: Positive = key(
        1.0, "Temperature of the distillation loss.", flag="-t", decides="result", aliases=("loss.temperature",)
    )
    lr: Positive = key(1e-5, "Highest learning rate.", flag="-lr", decides="result", aliases=("optimizer.lr",))
    final_lr: NonNegative = key(
        0.0, "Learning rate of the last step of wsd.", decides="result", aliases=("lr_scheduler.final_lr",)
    )
    decay_start: Annotated[float, Field(ge=0, le=1)] = key(
        0.9,
        "Part of the steps after which wsd begins to decay.",
        decides="result",
        aliases=("lr_scheduler.decay_start",),
    )
    decay_form: Literal["linear", "cosine", "1-sqrt", "exponential"] = key(
        "linear",
        "Curve on which wsd decays; exponential needs a final_lr above 0.",
        decides="result",
        aliases=("lr_scheduler.decay_form",),
    )
    warmup_form: Literal["linear", "cosine"] = key(
        "linear", "Curve on which wsd warms up.", decides="result", aliases=("lr_scheduler.warmup_form",)
    )
    alpha: NonNegative = key(
        0.0,
        "Weighs targets by ((kl / largest of the sample) + 1)^alpha; above 0 a step takes one more product with the"
        " output layer.",
        decides="result",
    )
    lr_scheduler: Scheduler = key(
        "wsd",
        "Schedule of the learning rate: wsd, or a name of transformers.",
        decides="result",
        aliases=("optimization.lr_scheduler",),
    )
    lr_scheduler_args: dict[str, Any] = key({}, "Further arguments of the schedule.", decides="result")
    optimizer: Optimizer = key(
        "adamw",
        "Optimizer; those with bits or pages in their names are bitsandbytes'.",
        decides="result",
        aliases=("optimization.optimizer",),
    )
    weight_decay: NonNegative = key(
        0.0,
        "Weight decay of matrices: decoupled with adamw, else part of the gradient.",
        decides="result",
        aliases=("optimizer.weight_decay",),
    )
    betas: tuple[Momentum, Momentum] = key(
        (0.9, 0.999), "Decay of Adam's two running means.", decides="result", aliases=("optimizer.betas",)
    )
    eps: Positive = key(
        1e-8, "Term that keeps an optimizer's quotient finite.", decides="result", aliases=("optimizer.eps",)
    )
    momentum: Momentum = key(0.0, "Momentum of sgd and rmsprop.", decides="result", aliases=("optimizer.momentum",))
    rmsprop_alpha: Momentum = key(
        0.99, "Decay of rmsprop's running mean.", decides="result", aliases=("optimizer.alpha",)
    )
    max_grad_norm: NonNegative = key(
        1.0,
        "Norm to which gradients are clipped; 0 leaves them.",
        decides="result",
        aliases=("optimization.clip_grad_norm",),
    )
    data_order: Literal["shuffle", "sorted", "native"] = key(
        "shuffle", "Order of samples: new each epoch, by length, or as in the text.", decides="result"
    )
    training_precision: Literal["fp32", "bf16", "fp16", "8bit", "4bit"] = key(
        "fp32",
        "Number format of the student in training; in 8bit and 4bit its weights are packed and adapters learn.",
        decides="result",
        aliases=("optimization.amp", "optimization.amp.dtype"),
    )
    lora_rank: Count | None = key(
        None,
        "Rank of adapters that are trained in the student's place (LoRA); null is none, or 16 where 8bit or 4bit needs"
        " them.",
        decides="result",
    )
    lora_alpha: Positive | None = key(
        None, "Scale of adapters times their rank; null is twice the rank.", decides="result"
    )
    lora_targets: tuple[str, ...] = key(
        (), "Ends of names of the linear layers that get adapters; empty for all but the output.", decides="result"
    )
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = key(0.0, "Dropout of the adapters' input.", decides="result")
    merge_into: Literal["dequantised", "original", "none"] = key(
        "dequantised",
        "What adapters are merged into at export: the weights they were trained on, the original ones, or none.",
        decides="result",
    )
    validate_every_n_epochs: NonNegative = key(
        1.0, "Time between validations; 0 = only before and after.", unit="epochs", inverse="evals_per_epoch"
    )
    early_stop_patience: Natural = key(
        0,
        "Validations in a row without a lower KL after which training ends; 0 = never.",
        unit="validations",
        decides="result",
    )
    save_student_every_n_epochs: NonNegative = key(
        0.0, "Time between exports of the student; 0 = only at the end.", unit="epochs", inverse="saves_per_epoch"
    )
    keep_students: Count | None = key(None, "Newest exports kept of those before the end; null keeps all.")
    save_best_student: bool = key(
        False, "Also export the student of the lowest validation KL, as NAME_best.", decides="result"
    )
    loader_workers: Annotated[int, Field(ge=0, le=64)] = key(
        1, "Threads that read the cache ahead of the training; 0 reads when it is needed.", unit="threads"
    )
    save_state_every_minutes: NonNegative = key(
        15.0, "Time between states to resume from; 0 = every step.", unit="minutes"
    )
    num_gpu0_layers: Natural | None = key(
        None, "Layers on the first GPU with device_map custom; null puts as many there as elsewhere.", unit="layers"
    )
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential", "custom"] = key(
        "auto", "How multi_gpu shares the layers out: a device map of accelerate, or custom, see num_gpu0_layers."
    )
    max_memory: MemoryByDevice | None = key(
        None,
        'Most memory multi_gpu uses by device: {"0": "24GB", "cpu": "64GB"}; with cpu, layers that no GPU has room for'
        " are computed there.",
    )
    multi_gpu: bool = key(False, "Spread the student over all GPUs that max_memory leaves to it.")
    save_final_state: bool = key(False, "Keep the optimizer's state after the last step.")
    use_flash_attn_2: bool = key(
        False, "Attend with FlashAttention 2, teacher and student; otherwise with sdpa.", flag="-fa2", decides="layer"
    )
    wandb_comment: str | None = key(None, "Log to Weights & Biases, under a name with this comment.", flag="-wdb")


class Student(Section):
    """What is special about the student."""

    title: ClassVar = "Student Settings"

    freeze_layers: tuple[str, ...] = key(
        (), "Parts of parameter names to leave untrained.", flag="-fl", decides="result"
    )
    add_bos: bool | None = key(
        None,
        "Begin samples with BOS: true = exactly one, false = none, null = as tokenizer or template does.",
        decides="result",
    )
    prompt_format: PromptFormat | None = key(
        None,
        f"Texts around the turns, in place of the chat template: an object of {', '.join(PROMPT_PARTS)}.",
        decides="result",
    )
