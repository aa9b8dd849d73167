"""Latents of the reference: which candidates take them, and when one draws its own after all."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.evalsets.cases import PromptCase
from pipeline.products.images import batches, evaluate
from pipeline.products.images.batches import Loaded, _denoise
from pipeline.products.images.rendering import Latents
from pipeline.products.images.shared_latents import SharedLatents, describe_denoising

CPU = torch.device("cpu")
CASES = [[PromptCase(id=f"{i}", cluster=f"{i}", buckets=(), prompt=f"a ball {i}", seed=i)] for i in range(4)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that were drawn; latents say theirs, and are moved by what the pipeline is called `off` by."""
    seeds: list[int] = []

    def make_latents(pipe: Any, prompts: Any, _serving: Any) -> Latents:
        seeds.extend(prompt.seed for prompt in prompts)
        return Latents(torch.full((1, 4, 2, 2), prompts[0].seed + pipe.off), [torch.tensor([1.5]), torch.tensor([2.5])])

    monkeypatch.setattr(batches, "make_latents", make_latents)
    return seeds


def load(folder: Path, *, is_reference: bool = False, off: float = 0.0) -> Loaded:
    pipe = SimpleNamespace(vae=SimpleNamespace(device=CPU), off=off)
    shared = SharedLatents(folder / "key", is_kept_here=is_reference)
    return Loaded(SimpleNamespace(serving=None), pipe, None, None, 0.05, {}, shared)  # type: ignore[arg-type]


def run(loaded: Loaded, some: list[list[PromptCase]] = CASES) -> list[tuple[Latents, float | None]]:
    return [_denoise(loaded, batch, None) for batch in some]


def test_one_batch_is_drawn_and_the_others_taken_where_it_is_equal(tmp_path: Path, drawn: list[int]) -> None:
    own = run(load(tmp_path, is_reference=True))
    assert drawn == [0, 1, 2, 3] and all(seconds is not None for _, seconds in own)
    drawn.clear()
    taken = run(load(tmp_path))
    assert drawn == [0]
    assert [seconds is None for _, seconds in taken] == [False, True, True, True]
    for (ours, _), (theirs, _) in zip(own, taken, strict=True):
        assert torch.equal(ours.values, theirs.values) and torch.equal(ours.mean_std_ratios(), theirs.mean_std_ratios())


def test_all_are_drawn_where_the_first_differs(tmp_path: Path, drawn: list[int]) -> None:
    """A kernel that sums in another order at each run is enough, whatever the digests say."""
    run(load(tmp_path, is_reference=True))
    drawn.clear()
    taken = run(load(tmp_path, off=1e-7))
    assert drawn == [0, 1, 2, 3]
    assert torch.equal(taken[3][0].values, torch.full((1, 4, 2, 2), 3 + 1e-7))


def test_a_repeat_of_the_reference_draws_all_again_and_writes(tmp_path: Path, drawn: list[int]) -> None:
    run(load(tmp_path, is_reference=True))
    run(load(tmp_path, is_reference=True))
    assert drawn == [0, 1, 2, 3] * 2


def test_a_batch_that_is_missing_damaged_or_of_another_guidance_is_drawn(tmp_path: Path, drawn: list[int]) -> None:
    run(load(tmp_path, is_reference=True))
    files = {path.stat().st_mtime_ns: path for path in (tmp_path / "key").iterdir()}
    for number, path in enumerate(files[time] for time in sorted(files)):
        data = bytearray(path.read_bytes())
        if number == 1:
            path.unlink()
        elif number == 2:  # a bit of a value: zip files have sums
            place = data.find(torch.full((4,), 2.0).numpy().tobytes())
            assert place > 0
            data[place] ^= 1
            path.write_bytes(data)
        elif number == 3:
            path.write_bytes(data[:50])
    drawn.clear()
    loaded = load(tmp_path)
    run(loaded)
    assert drawn == [0, 1, 2, 3]
    assert loaded.shared is not None and loaded.shared.are_equal
    assert _denoise(loaded, CASES[0], None)[1] is None
    assert _denoise(loaded, CASES[0], "glass")[1] is not None


def test_the_reference_keeps_latents_of_one_making(tmp_path: Path, drawn: list[int]) -> None:
    (tmp_path / "earlier").mkdir()
    run(load(tmp_path, is_reference=True), CASES[:1])
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


FACTS: dict[str, Any] = {
    "checkpoint": {"digest": "d", "files": {"model_index.json": "a", "unet/w.safetensors": "b", "vae/w": "c"}},
    "serving": {"vae_dtype": "float32", "tiling.tile": None, "channels_last": [], "num_inference_steps": 20},
    "libraries": {"torch": "2"},
    "hardware": {"device": "cpu"},
}


def change(path: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(FACTS)
    *folders, key = path.split(">")
    at = facts
    for folder in folders:
        at = at[folder]
    at[key] = value
    return facts


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("checkpoint>digest", "of all files"),
        ("checkpoint>files>vae/w", "rescaled"),
        ("checkpoint>files>sheet.png", "a picture"),
        ("serving>vae_dtype", "float16"),
        ("serving>tiling.tile", 32),
        ("serving>channels_last", ["vae"]),
    ],
)
def test_what_decodes_does_not_matter(path: str, value: Any) -> None:
    assert describe_denoising(change(path, value), 8) == describe_denoising(FACTS, 8)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("checkpoint>files>unet/w.safetensors", "other weights"),
        ("checkpoint>files>scheduler/scheduler_config.json", "another"),
        ("serving>num_inference_steps", 10),
        ("serving>unet_dtype", "float16"),
        ("serving>channels_last", ["unet", "vae"]),
        ("libraries>torch", "3"),
        ("hardware>device", "cuda"),
        ("key", "other cases, settings or code"),
    ],
)
def test_all_that_makes_latents_matters(path: str, value: Any) -> None:
    assert describe_denoising(change(path, value), 8) != describe_denoising(FACTS, 8)


def test_the_size_that_a_unet_is_told_matters() -> None:
    assert describe_denoising(FACTS, 8) != describe_denoising(FACTS, 4)


@pytest.mark.parametrize(
    ("name", "steps", "takes_part"),
    [("ours", (), True), ("again", (), False), ("tiled", ({"kind": "vae_tiling"},), True)],
)
def test_a_repeat_without_steps_takes_none(
    name: str, steps: tuple[Any, ...], takes_part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the floor would be nought by construction."""
    monkeypatch.setattr(evaluate, "digest_judges", lambda *_: {})
    monkeypatch.setattr(evaluate, "digest_work", lambda *_: "key")
    product: Any = SimpleNamespace(
        reference="ours", evals={"shots": None}, candidates={"ours": SimpleNamespace(checkpoint="models/a")}
    )
    candidate: Any = SimpleNamespace(name=name, steps=steps)
    setup = evaluate._prepare("shots", None, candidate, product, root=tmp_path, build=tmp_path)  # type: ignore[arg-type]
    assert (setup.latents is not None) == takes_part
    assert setup.is_reference == (name == "ours")
