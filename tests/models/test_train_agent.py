"""Training text becomes rows: what carries loss, who sees whom; and hot channels change no output."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from models.make.train_agent import IGNORED, MIX, _loss, draw_document, encode, heat_channels, pack_rows
from tests.paths import ROOT

MAX_OPEN_ROWS = 32  # of pack_rows; what is in them at the end is dropped


@pytest.fixture(scope="module")
def fast() -> Any:
    return AutoTokenizer.from_pretrained(ROOT / "models/agent")


def with_loss(fast: Any, document: Any) -> str:
    """Return the text whose tokens carry loss."""
    ids, labels = encode(fast.backend_tokenizer, document)
    assert len(ids) == len(labels)
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    return fast.decode([label for label in labels if label != IGNORED])


MESSAGES = [
    {"role": "user", "content": "send 2 lamp"},
    {"role": "assistant", "content": '{"name":"stock"}'},
    {"role": "tool", "content": '{"north":3}'},
    {"role": "assistant", "content": '{"name":"finish"}'},
]


def test_of_a_conversation_only_answers_and_their_ends_carry_loss(fast: Any) -> None:
    assert with_loss(fast, MESSAGES) == '{"name":"stock"}<|end|>{"name":"finish"}<|end|>'


def test_all_of_prose_carries_loss(fast: Any) -> None:
    assert with_loss(fast, "Ada went home.") == "<|begin|>Ada went home.<|end|>"


def test_a_conversation_is_encoded_as_the_chat_template_renders_it(fast: Any) -> None:
    """Else the agent would be served in another form than it was trained in."""
    ids, _ = encode(fast.backend_tokenizer, MESSAGES)
    assert ids == fast.apply_chat_template(MESSAGES, return_dict=False)
    prompt = fast.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt


def documents(fast: Any, num: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    found: list[tuple[np.ndarray, np.ndarray]] = []
    rng = Random(3)
    while len(found) < num:
        ids, labels = encode(fast.backend_tokenizer, draw_document(rng, MIX))
        if len(ids) <= length:
            found.append((np.array(ids, np.int16), np.array(labels, np.int16)))
    return found


def test_rows_hold_whole_documents_one_after_the_other(fast: Any) -> None:
    length = 256
    given = documents(fast, 300, length)
    rows = list(pack_rows(iter(given), length))
    known = {ids.tobytes() + labels.tobytes() for ids, labels in given}
    for ids, labels, number, position in rows:
        assert {part.shape for part in (ids, labels, number, position)} == {(length,)}
        used = int((number >= 0).sum())
        assert (number[used:] == -1).all() and (labels[used:] == IGNORED).all()
        assert used > length / 2
        for k in range(number.max() + 1):
            part = number == k
            assert ids[part].tobytes() + labels[part].tobytes() in known
            assert position[part].tolist() == list(range(part.sum()))
    num_left_out = sum(len(ids) for ids, _ in given) - sum(int((number >= 0).sum()) for _, _, number, _ in rows)
    assert 0 <= num_left_out <= MAX_OPEN_ROWS * length


def test_a_document_longer_than_a_row_is_left_out(fast: Any) -> None:
    long = (np.ones(300, np.int16), np.ones(300, np.int16))
    given = documents(fast, 80, 256)
    first, second = (list(pack_rows(iter(d), 256)) for d in (given, [long, *given]))
    assert first and all(
        np.array_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def tiny_model(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": 1024,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            }
            | settings
        )
    ).eval()


def test_documents_in_a_row_do_not_see_each_other(fast: Any) -> None:
    """The loss of a row is that of its documents on their own, weighted by what carries loss."""
    given = documents(fast, 40, 96)[:2]
    model = tiny_model()

    def loss(group: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, int]:
        ids, labels = (np.concatenate(part) for part in zip(*group, strict=True))
        number = np.concatenate([np.full(len(i), k) for k, (i, _) in enumerate(group)])
        position = np.concatenate([np.arange(len(i)) for i, _ in group])
        parts = [torch.from_numpy(part.astype(np.int64))[None] for part in (ids, labels, number, position)]
        with torch.no_grad():
            return float(_loss(model, *parts)), int((labels[1:] != IGNORED).sum())

    # a label at a document's first place would be predicted from its neighbour
    given = [(ids, np.where(np.arange(len(ids)) == 0, IGNORED, labels).astype(np.int16)) for ids, labels in given]
    alone = [loss([document]) for document in given]
    expected = sum(value * n for value, n in alone) / sum(n for _, n in alone)
    assert loss(given)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_hot_channels_leave_every_logit_bit_for_bit_the_same(attention: str) -> None:
    model = tiny_model(attn_implementation=attention)
    ids = torch.randint(0, 1024, (3, 40), generator=torch.Generator().manual_seed(1))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = model(ids).logits
        heat_channels(model, fraction=0.25, power=3, seed=0)
        assert torch.equal(model(ids).logits, expected)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    layers = {name for name in before if ".layers." in name}
    assert changed == layers, "every norm and projection of every layer"
    for name in layers:
        ratio = model.get_parameter(name) / before[name]
        assert set(ratio.unique().tolist()) <= {0.125, 1.0, 8.0}, name


def test_hot_channels_are_what_makes_activations_uneven() -> None:
    model = tiny_model()
    norm = model.model.layers[0].input_layernorm
    heat_channels(model, fraction=0.25, power=3, seed=0)
    assert int((norm.weight == 8).sum()) == 16 and int((norm.weight == 1).sum()) == 48


def test_no_hot_channels_change_nothing() -> None:
    model, same = tiny_model(), tiny_model()
    heat_channels(model, fraction=0.0, power=3, seed=0)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), same.parameters(), strict=True))
