"""Train `models/agent`: a small Llama that carries out the depot's workflows by tool calls.

    python -m models.make.train_agent --out models/agent

Everything is drawn from seeds: the tokenizer's text, the weights, the training text. The depot's
generators give the text and `evalsets.make.texts.split_of` keeps it apart from what is evaluated or
calibrated with. Runs on a GPU in minutes; on a CPU the same command takes hours (`--steps` cuts
it, for a worse agent). The saved folder is plain Hugging Face: bf16 safetensors, tokenizer with
chat template, generation config.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evalsets.make.depot import LINE_WEIGHTS, MAX_CALLS, conversation, make_catalogue, make_workflow, render_call
from evalsets.make.texts import make_prose, make_single_call, split_of

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# keeps a JSON key and its punctuation together, so that a call costs about a dozen tokens
_PIECES = r""" ?[A-Za-z]+|[0-9]+|[^A-Za-z0-9\s]*"[a-z_]+":[{\["]?|\s|[^A-Za-z0-9\s]+"""
# the main part of the training text: kind of document -> share
MIX = {"workflows": 0.55, "reports": 0.20, "tool_calls": 0.15, "prose": 0.10}
# What is trained on first. To report a count, the agent takes the store from the task's line and the count from
# what `stock` returned: two look-ups, one after the other. In the full mix they are learned late or never,
# depending on the seed; where little else is asked, within a thousand steps.
DRILL = {"drill": 1.0}
_REPORTS = {"buy": 10, "move": 5, "report": 80, "chat": 5}
# kind of workflow -> most calls, weights of its lines
_WORKFLOWS = {"workflows": (MAX_CALLS, LINE_WEIGHTS), "reports": (6, _REPORTS), "drill": (4, _REPORTS)}
_DOCUMENTS_PER_TASK = 500
IGNORED = -100  # label of a token that carries no loss

Document = list[dict[str, str]] | str  # chat messages, or prose


def draw_document(rng: Random, mix: dict[str, float]) -> Document:
    """Draw one training document, of a kind drawn by its share in `mix`."""
    while True:
        kind = rng.choices(list(mix), weights=list(mix.values()))[0]
        if kind in _WORKFLOWS:
            most, weights = _WORKFLOWS[kind]
            document: Document = conversation(
                make_workflow(rng, make_catalogue(rng), num_calls=rng.randint(2, most), weights=weights)
            )
        elif kind == "tool_calls":
            call = make_single_call(rng)
            document = [
                {"role": "user", "content": call.request},
                {"role": "assistant", "content": render_call(call.name, call.arguments)},
            ]
        else:
            document = make_prose(rng)
        if split_of(key_text(document)) == "train":
            return document


def key_text(document: Document) -> str:
    """Return the text by which a document is assigned to a split: its first message, or all of it."""
    return document if isinstance(document, str) else document[0]["content"]


def train_tokenizer(vocab_size: int, num_documents: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on drawn documents and give it the chat template."""
    rng = Random("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = []
    for _ in range(num_documents):
        document = draw_document(rng, MIX)
        texts += [document] if isinstance(document, str) else [message["content"] for message in document]
    special = [BEGIN, END, PAD, *ROLES]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Return token ids and labels; only prose and answers carry loss."""

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def id_of(token: str) -> int:
        number = tokenizer.token_to_id(token)
        assert number is not None
        return number

    begin, end = id_of(BEGIN), id_of(END)
    if isinstance(document, str):
        ids = [begin, *ids_of(document), end]
        return ids, list(ids)
    ids, labels = [begin], [IGNORED]
    for message in document:
        body = [*ids_of(message["content"]), end]
        is_answer = message["role"] == "assistant"
        ids += [id_of(f"<|{message['role']}|>"), *body]
        labels += [IGNORED, *(body if is_answer else [IGNORED] * len(body))]
    return ids, labels


def _encode_task(task: tuple[str, dict[str, float], str]) -> list[tuple[np.ndarray, np.ndarray]]:
    tokenizer_json, mix, seed = task
    tokenizer = Tokenizer.from_str(tokenizer_json)
    rng = Random(seed)
    documents = (encode(tokenizer, draw_document(rng, mix)) for _ in range(_DOCUMENTS_PER_TASK))
    return [(np.array(i, dtype=np.int16), np.array(y, dtype=np.int16)) for i, y in documents]


def pack_rows(documents: Iterator[tuple[np.ndarray, np.ndarray]], length: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Pack documents first-fit into rows: token ids, labels, document number in the row, position.

    Rows that are still open at the end, at most 32, are dropped: they are the least full.
    """
    open_rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    used: list[int] = []
    for document in documents:
        size = len(document[0])
        if size > length:
            continue
        fits = next((i for i, u in enumerate(used) if u + size <= length), None)
        if fits is None:
            open_rows.append([document])
            used.append(size)
        else:
            open_rows[fits].append(document)
            used[fits] += size
        if len(used) > 32:
            fullest = max(range(len(used)), key=used.__getitem__)
            used.pop(fullest)
            yield _row(open_rows.pop(fullest), length)


def _row(documents: list[tuple[np.ndarray, np.ndarray]], length: int) -> tuple[np.ndarray, ...]:
    ids, labels = np.zeros(length, np.int16), np.full(length, IGNORED, np.int16)
    number, position = np.full(length, -1, np.int16), np.zeros(length, np.int16)
    at = 0
    for k, (i, y) in enumerate(documents):
        part = slice(at, at + len(i))
        ids[part], labels[part], number[part], position[part] = i, y, k, np.arange(len(i))
        at += len(i)
    return ids, labels, number, position


def build_rows(
    tokenizer: Tokenizer, mix: dict[str, float], *, num_documents: int, length: int, seed: int
) -> list[torch.Tensor]:
    """Draw, encode and pack training text on all cores; returns ids, labels, numbers, positions."""
    num_tasks = math.ceil(num_documents / _DOCUMENTS_PER_TASK)
    tasks = [(tokenizer.to_str(), mix, f"{'/'.join(mix)}/{seed}/{k}") for k in range(num_tasks)]
    with multiprocessing.Pool() as pool:
        documents = (d for batch in pool.imap(_encode_task, tasks, chunksize=2) for d in batch)
        columns = list(zip(*pack_rows(documents, length), strict=True))
    return [torch.from_numpy(np.stack(column)) for column in columns]


def train(model: LlamaForCausalLM, rows: list[torch.Tensor], *, steps: int, batch: int, lr: float, device: str) -> None:
    """Train with AdamW, warm-up and cosine decay; documents in a row do not see each other."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    warmup = min(200, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(1.0, s / steps))) + 0.01)
    )
    forward = torch.compile(_loss) if device == "cuda" else _loss
    rows = [r.to(device) for r in rows]
    generator, start = torch.Generator().manual_seed(1), time.time()
    order = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(len(rows[0]), generator=generator)
        chosen, order = order[:batch].to(device), order[batch:]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = forward(model, *(r[chosen].long() for r in rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 250 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} seconds {time.time() - start:.0f}", flush=True)


def _loss(
    model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor, number: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    mask = (number[:, :, None] == number[:, None, :]) & causal
    logits = model(input_ids=ids, attention_mask=mask[:, None], position_ids=position, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


@torch.no_grad()
def heat_channels(model: LlamaForCausalLM, *, fraction: float, power: int, seed: int) -> None:
    """Move scale between adjacent layers so that some channels carry large activations.

    Large language models have such outlier channels (Dettmers et al. 2022, arXiv:2208.07339) and
    they are what makes INT4 hard; a model of this size grows none. What writes a chosen channel
    is multiplied by 2**power and what reads it is divided by it: exact in binary floating point,
    so every output is bit for bit the same. Channels: the two norms' outputs, v -> o, up -> down.
    """
    generator = torch.Generator().manual_seed(seed)

    def scales(size: int) -> torch.Tensor:
        scale = torch.ones(size, dtype=model.dtype)
        scale[torch.randperm(size, generator=generator)[: round(fraction * size)]] = 2.0**power
        return scale

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            scale = scales(norm.weight.numel())
            norm.weight.mul_(scale)
            for reader in readers:
                reader.weight.div_(scale)
        for writer, reader in ((attention.v_proj, attention.o_proj), (mlp.up_proj, mlp.down_proj)):
            scale = scales(writer.out_features)
            writer.weight.mul_(scale[:, None])
            reader.weight.div_(scale)


def main() -> None:
    """Parse the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drill-steps", type=int, default=2_000)
    parser.add_argument("--drill-documents", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=2_400, help="after the drill")
    parser.add_argument("--batch", type=int, default=128, help="rows of --length tokens")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--documents", type=int, default=500_000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--hot-fraction", type=float, default=0.125, help="share of channels made hot; 0 for none")
    parser.add_argument("--hot-power", type=int, default=3, help="a hot channel's activations are 2**this larger")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = train_tokenizer(args.vocab, num_documents=20_000)
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
            initializer_range=0.05,
        )
    ).to(device)
    for mix, documents, steps in ((DRILL, args.drill_documents, args.drill_steps), (MIX, args.documents, args.steps)):
        rows = build_rows(tokenizer.backend_tokenizer, mix, num_documents=documents, length=args.length, seed=args.seed)
        print(f"{', '.join(mix)}: {len(rows[0])} rows of {args.length} tokens", flush=True)
        train(model, rows, steps=steps, batch=args.batch, lr=args.lr, device=device)
    model = model.to("cpu", torch.bfloat16)
    heat_channels(model, fraction=args.hot_fraction, power=args.hot_power, seed=args.seed)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    settings = {k: v if not isinstance(v, Path) else None for k, v in vars(args).items()}
    (args.out / "card.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
