"""Calibration samples: the weighting is what was asked, and bad input is refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EvalsetError, QuantizationError
from pipeline.evalsets.cards import Card, Evalset
from pipeline.evalsets.cases import DocumentCase
from pipeline.products.text.optimize.calibration import count_samples, encode, select_samples
from pipeline.products.text.step_settings import Calibration
from tests.fakes.tiny_llama import build_tokenizer

SHORT, LONG = 50, 200  # tokens


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def make_set(texts: dict[str, list[str]], kind: str = "documents") -> Evalset:
    cases = tuple(
        DocumentCase(id=f"{bucket}-{i}", cluster=f"{bucket}-{i}", buckets=(bucket,), text=text)
        for bucket, found in texts.items()
        for i, text in enumerate(found)
    )
    card = Card(
        name="calibration",
        version="1",
        licence="CC0-1.0",
        kind=kind,
        description="",
        made_by="test",
        num_cases=len(cases),
        sha256="",
        cluster="document",
        num_clusters=len(cases),
        buckets={bucket: len(found) for bucket, found in texts.items()},
    )
    return Evalset(card=card, cases=cases, digest="")


def digits(number: int, length: int) -> str:
    """A text of exactly `length` tokens: no merge joins these characters."""
    return "".join("QZXVKJWY"[number >> shift & 7] for shift in (6, 3, 0)) + "#" * (length - 3)


def settings(**changes: Any) -> Calibration:
    usual: dict[str, Any] = {"sources": ["prose"], "num_samples": 20, "max_tokens": 500, "length_exponent": 0.0}
    return Calibration(**usual | changes)


@pytest.fixture(scope="module")
def mixed() -> Evalset:
    return make_set({"prose": [digits(i, SHORT if i < 40 else LONG) for i in range(50)]})


def test_without_weighting_no_text_is_drawn_twice(mixed: Evalset, tokenizer: Any) -> None:
    samples = select_samples(mixed, tokenizer, settings(num_samples=50))
    assert Counter(map(tuple, samples)).most_common(1)[0][1] == 1
    assert count_samples(samples) == {
        "num_samples": 50,
        "num_distinct": 50,
        "num_tokens": 40 * SHORT + 10 * LONG,
        "min_tokens": SHORT,
        "median_tokens": SHORT,
        "p90_tokens": LONG,
        "max_tokens": LONG,
    }


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_each_text_is_drawn_as_often_as_its_weight_asks(mixed: Evalset, tokenizer: Any, exponent: float) -> None:
    num_samples = 100
    samples = select_samples(mixed, tokenizer, settings(num_samples=num_samples, length_exponent=exponent))
    total = 40 * SHORT**exponent + 10 * LONG**exponent
    for length, count in ((SHORT, 40), (LONG, 10)):
        expected = num_samples * length**exponent / total
        drawn = Counter(tuple(ids) for ids in samples if len(ids) == length)
        assert all(int(expected) <= n <= int(expected) + 1 for n in drawn.values()), drawn
        assert abs(sum(drawn.values()) - count * expected) < count


def test_weight_counts_the_tokens_that_are_left_after_the_cut(mixed: Evalset, tokenizer: Any) -> None:
    samples = select_samples(mixed, tokenizer, settings(num_samples=50, max_tokens=SHORT, length_exponent=4.0))
    assert count_samples(samples)["num_distinct"] == 50
    assert {len(ids) for ids in samples} == {SHORT}


def test_seed_decides_the_draw(mixed: Evalset, tokenizer: Any) -> None:
    first, again, other = (select_samples(mixed, tokenizer, settings(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_sources_filter_by_bucket(tokenizer: Any) -> None:
    evalset = make_set({"prose": [digits(i, LONG) for i in range(5)], "workflows": [digits(9, LONG) + "!"]})
    samples = select_samples(evalset, tokenizer, settings(sources=["workflows"], num_samples=3))
    assert count_samples(samples)["num_distinct"] == 1
    with pytest.raises(QuantizationError, match="is in bucket 'tools'; it has prose, workflows"):
        select_samples(evalset, tokenizer, settings(sources=["prose", "tools"]))


def test_special_tokens_are_not_added_twice(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)]
    )
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert tokenizer.bos_token_id not in encode(rendered, tokenizer)
    assert encode("hello", tokenizer)[0] == tokenizer.bos_token_id
    assert encode("<|bos|>hello", tokenizer) == encode("hello", tokenizer)


def test_too_few_tokens_are_refused_with_the_numbers(mixed: Evalset, tokenizer: Any) -> None:
    with pytest.raises(QuantizationError, match="expected at least 512 tokens, got 4 in 1 samples"):
        select_samples(mixed, tokenizer, settings(num_samples=1, max_tokens=4))


def test_ids_outside_the_vocabulary_are_refused(mixed: Evalset, tokenizer: Any) -> None:
    with pytest.raises(QuantizationError, match="is outside the embedding of 10 rows"):
        select_samples(mixed, tokenizer, settings(), vocab_size=10)


def test_another_kind_of_evalset_is_refused(tokenizer: Any) -> None:
    with pytest.raises(EvalsetError, match="expected kind 'documents', got 'choices'"):
        select_samples(make_set({"prose": ["x"]}, kind="choices"), tokenizer, settings())


def test_calibration_loads_from_disk(tmp_path: Path, tokenizer: Any) -> None:
    """The written layout is that of any evalset: a user's own texts need no code."""
    from pipeline.evalsets.cards import load_evalset
    from tests.fakes.tiny_llama import write_documents

    evalset = load_evalset(write_documents(tmp_path / "texts", {"prose": [digits(i, LONG) for i in range(5)]}))
    assert len(select_samples(evalset, tokenizer, settings(num_samples=5))) == 5
