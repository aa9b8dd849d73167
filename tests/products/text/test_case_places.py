"""Places: so many cases at once over all evals, those of more turns first, and none lost."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.products.text.evals.places import Places


async def hold(places: Places, rank: int, name: str, order: list[str], goes: asyncio.Event) -> None:
    async with places.take((rank,)):
        order.append(name)
        await goes.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_free_place_goes_to_the_lowest_rank_and_then_to_who_came_first() -> None:
    async def run() -> list[str]:
        places, order, goes = Places(1), list[str](), asyncio.Event()
        arrivals = [(0, "first"), (0, "b"), (-8, "long"), (0, "c"), (-8, "longer")]
        async with asyncio.TaskGroup() as group:
            for rank, name in arrivals:
                group.create_task(hold(places, rank, name, order, goes))
                await settle()
            assert order == ["first"]
            goes.set()
        return order

    assert asyncio.run(run()) == ["first", "long", "longer", "b", "c"]


@pytest.mark.parametrize("has_come", [False, True], ids=["waiting", "in the moment when its turn came"])
def test_who_is_cancelled_leaves_the_place_to_the_next(has_come: bool) -> None:
    async def run() -> list[str]:
        places, order, goes, first_goes = Places(1), list[str](), asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(hold(places, 0, "first", order, first_goes))
        await settle()
        second, third = (asyncio.create_task(hold(places, 0, name, order, goes)) for name in ("second", "third"))
        await settle()
        if has_come:
            first_goes.set()
            while not first.done():
                await asyncio.sleep(0)
            assert order == ["first"], "the place was passed on, and nobody has begun"
        second.cancel()
        first_goes.set()
        goes.set()
        await asyncio.gather(first, second, third, return_exceptions=True)
        async with asyncio.timeout(5), places.take((0,)):
            order.append("free again")
        return order

    assert asyncio.run(run()) == ["first", "third", "free again"]


def test_a_case_that_raises_gives_its_place_back() -> None:
    async def run() -> None:
        places = Places(1)
        with pytest.raises(ValueError):
            async with places.take((0,)):
                raise ValueError
        async with asyncio.timeout(5), places.take((0,)):
            pass

    asyncio.run(run())
