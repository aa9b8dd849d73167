"""A tokenizer that puts BOS before a text, as Llama's does, behind a real server: each way to the model has one BOS."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from pipeline.evalsets.cards import load_evalset
from pipeline.products.text.evals import perplexity
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.evals.places import Places
from pipeline.products.text.model_loading import load_model, load_tokenizer
from pipeline.products.text.optimize.calibration import encode
from pipeline.products.text.serving.client import Client
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.settings import PerplexityEval
from pipeline.running.journal import Journal
from tests.fakes.tiny_llama import TEXTS, write_documents, write_tiny_llama
from tests.integration.test_serving import EVALS, SETTINGS, make_candidate
from tests.products.text.test_framing import BOS, DOCUMENTS, MAX_DIFFERENCE_NATS, sum_nll

MESSAGES = [{"role": "user", "content": "hello"}]


def write_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of which both the tokenizer and the chat template put BOS in front."""
    write_tiny_llama(folder, initializer_range=0.2)
    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = BOS + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


async def ask(folder: Path, root: Path) -> tuple[list[Any], list[list[int]]]:
    """Return the records of perplexity, and the prompts of one chat as tokenised and as answered."""
    starting = start_engine(make_candidate(folder), SETTINGS, evals=EVALS, root=root, logs=root / "logs")
    async with starting as (engine, client):
        settings = PerplexityEval(kind="perplexity", evalset="set")
        context = EvalContext(
            name="e",
            settings=settings,
            evalset=load_evalset(root / "set"),
            client=client,
            journal=Journal(root / "journal", fingerprint=engine.fingerprint, key="k"),
            checkpoint=folder,
            folder=root,
            places=Places(4),
            max_tokens=8,
            context_length=32,
            fingerprint=engine.fingerprint,
        )
        records = await perplexity.evaluate(context)
        # as another engine's client asks: without lists of texts, which vLLM does not take
        async with Client(engine.base_urls, client.model, concurrency=4, timeout_s=60) as other:
            for server in other._servers:
                server.takes_lists = False
            journal = Journal(root / "journal-2", fingerprint=engine.fingerprint, key="k")
            context = dataclasses.replace(context, client=other, journal=journal)
            assert [r.scores for r in await perplexity.evaluate(context)] == [r.scores for r in records]
        reply = await client.chat(MESSAGES, max_tokens=2, return_token_ids=True)
        return records, [await client.tokenize_chat(MESSAGES), list(reply.prompt_token_ids or ())]


def test_every_way_to_the_model_has_one_bos(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    write_documents(tmp_path / "set", {"prose": DOCUMENTS})
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype="float32")
    bos = tokenizer.bos_token_id
    assert tokenizer(TEXTS[0])["input_ids"][0] == bos, "else nothing is tested"
    records, prompts = asyncio.run(ask(folder, tmp_path))
    for record, text in zip(records, DOCUMENTS, strict=True):
        tokens = tokenizer(text.removeprefix(BOS), add_special_tokens=False)["input_ids"]
        assert record.scores["num_tokens"] == len(tokens)
        assert abs(record.scores["nll_nats"] - sum_nll(model, bos, tokens)) < MAX_DIFFERENCE_NATS * len(tokens)
    for ids in prompts:
        assert ids[0] == bos and ids.count(bos) == 1
    for text in (TEXTS[0], tokenizer.apply_chat_template(MESSAGES, tokenize=False)):
        assert encode(text, tokenizer).count(bos) == 1, "what a quantiser is calibrated on"
