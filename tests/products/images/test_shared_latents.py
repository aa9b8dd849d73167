"""Latents of the reference: which candidates take them, and when one draws its own after all."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from pipeline.evalsets.cases import PromptCase
from pipeline.products.images import batches
from pipeline.products.images.batches import Loaded, _denoise
from pipeline.products.images.rendering import Latents
from pipeline.products.images.shared_latents import SharedLatents, describe_denoising
from pipeline.records.digests import digest_bytes, digest_json
from pipeline.records.serving import PipelineServing

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


def load(folder: Path, *, is_reference: bool = False, off: float = 0.0, mark: str = "b" * 64) -> Loaded:
    pipe = SimpleNamespace(vae=SimpleNamespace(device=CPU), off=off)
    shared = SharedLatents(folder / "key", "a" * 64 if is_reference else mark, is_kept_here=is_reference)
    return Loaded(SimpleNamespace(serving=None), pipe, None, None, 0.05, {}, shared)  # type: ignore[arg-type]


def run(loaded: Loaded, some: list[list[PromptCase]] = CASES) -> list[tuple[Latents, float | None]]:
    return [_denoise(loaded, batch, None) for batch in some]


def find_file(folder: Path, number: int) -> Path:
    return folder / "key" / digest_json([None, CASES[number][0].digest])


def test_two_batches_are_drawn_and_the_others_taken_where_these_are_equal(tmp_path: Path, drawn: list[int]) -> None:
    own = run(load(tmp_path, is_reference=True))
    assert drawn == [0, 1, 2, 3] and all(seconds is not None for _, seconds in own)
    drawn.clear()
    taken = run(load(tmp_path))
    assert drawn == [0, 1]
    assert [seconds is None for _, seconds in taken] == [False, False, True, True]
    for (ours, _), (theirs, _) in zip(own, taken, strict=True):
        assert torch.equal(ours.values, theirs.values) and torch.equal(ours.mean_std_ratios(), theirs.mean_std_ratios())


def test_all_are_drawn_where_the_first_differs(tmp_path: Path, drawn: list[int]) -> None:
    """A kernel that sums in another order at each run is enough, whatever the digests say."""
    run(load(tmp_path, is_reference=True))
    drawn.clear()
    loaded = load(tmp_path, off=2.0**-20)
    run(loaded)
    assert drawn == [0, 1, 2, 3]
    assert loaded.shared.differ


def test_all_are_drawn_where_the_second_differs(tmp_path: Path, drawn: list[int]) -> None:
    """A process that carries something from one batch to the next draws its first one as any other does."""
    run(load(tmp_path, is_reference=True))
    drawn.clear()
    loaded = load(tmp_path)
    run(loaded, CASES[:1])
    loaded.pipe.off = 2.0**-20
    run(loaded, CASES[1:])
    assert drawn == [0, 1, 2, 3]
    assert loaded.shared.differ


def test_the_reference_draws_all_each_time(tmp_path: Path, drawn: list[int]) -> None:
    run(load(tmp_path, is_reference=True))
    run(load(tmp_path, is_reference=True))
    assert drawn == [0, 1, 2, 3] * 2


def test_a_batch_that_is_missing_damaged_or_of_another_guidance_is_drawn(tmp_path: Path, drawn: list[int]) -> None:
    run(load(tmp_path, is_reference=True))
    loaded = load(tmp_path)
    run(loaded, CASES[:2])
    drawn.clear()
    find_file(tmp_path, 0).unlink()
    for number, damage in ((1, lambda data: data[:50]), (2, lambda data: data[:-1] + bytes([data[-1] ^ 1]))):
        path = find_file(tmp_path, number)
        path.write_bytes(damage(path.read_bytes()))
    run(loaded)
    assert drawn == [0, 1, 2]
    assert not loaded.shared.differ
    assert _denoise(loaded, CASES[3], None)[1] is None
    assert _denoise(loaded, CASES[3], "glass")[1] is not None


def test_what_can_not_be_kept_stops_nothing(tmp_path: Path, drawn: list[int]) -> None:
    (tmp_path / "key").write_text("a file where a folder is to be")
    run(load(tmp_path, is_reference=True))
    run(load(tmp_path))
    assert drawn == [0, 1, 2, 3] * 2


def test_latents_of_another_making_are_removed(tmp_path: Path) -> None:
    for name in ("earlier", "key"):
        (tmp_path / name).mkdir()
    SharedLatents(tmp_path / "key", "a" * 64, is_kept_here=True).remove_others()
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


FACTS: dict[str, Any] = {
    "checkpoint": {"digest": "d", "files": {"model_index.json": "a", "unet/w.safetensors": "b", "vae/w": "c"}},
    "serving": PipelineServing(num_inference_steps=20, guidance_scale=5).identity(),
    "libraries": {"torch": "2"},
    "hardware": {"device": "cpu"},
}


def change(path: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(FACTS)
    *folders, key = path.split(">")
    at = facts
    for folder in folders:
        at = at[folder]
    assert len(folders) != 1 or folders[0] != "serving" or key in at, "a setting that there is"
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


def test_the_reference_once_more_takes_none(tmp_path: Path, drawn: list[int]) -> None:
    """Under whatever name, and after a step that changes nothing: or nothing could move between the two."""
    run(load(tmp_path, is_reference=True))
    drawn.clear()
    loaded = load(tmp_path, mark="a" * 64)
    run(loaded)
    assert drawn == [0, 1, 2, 3]
    assert not loaded.shared.differ and not loaded.shared.num_equal


def test_latents_that_are_no_numbers_are_equal_where_their_bits_are(tmp_path: Path, drawn: list[int]) -> None:
    run(load(tmp_path, is_reference=True, off=float("nan")))
    drawn.clear()
    loaded = load(tmp_path, off=float("nan"))
    run(loaded)
    assert drawn == [0, 1] and not loaded.shared.differ


@pytest.mark.parametrize("data", [b"", b"no tensors", save({"other": torch.zeros(1)})])
def test_what_holds_no_latents_is_drawn_though_its_sum_is_right(data: bytes, tmp_path: Path, drawn: list[int]) -> None:
    run(load(tmp_path, is_reference=True))
    content = b"a" * 64 + data
    for number in range(len(CASES)):
        find_file(tmp_path, number).write_bytes(digest_bytes(content).encode() + content)
    drawn.clear()
    run(load(tmp_path))
    assert drawn == [0, 1, 2, 3]
