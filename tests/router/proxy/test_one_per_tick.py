"""Requests that come at once begin one after another, and are sent in between."""

import asyncio

from router.proxy.lifecycle import OnePerTick


async def test_one_is_let_through_in_each_turn_of_the_loop() -> None:
    one_per_tick, happened = OnePerTick(), []

    async def request(number: int) -> None:
        await one_per_tick.enter()
        happened.append(f"read {number}")
        await asyncio.sleep(0)
        happened.append(f"sent {number}")

    await asyncio.gather(*map(request, range(50)))
    reads = [event for event in happened if event.startswith("read")]
    assert reads == [f"read {number}" for number in range(50)]
    for number in range(48):
        assert happened.index(f"sent {number}") < happened.index(f"read {number + 2}")


async def test_who_comes_alone_does_not_wait() -> None:
    one_per_tick = OnePerTick()
    entering = one_per_tick.enter()
    try:
        entering.send(None)
    except StopIteration:
        pass
    else:
        raise AssertionError("it waited")


async def test_one_that_gives_up_holds_nobody_up() -> None:
    one_per_tick = OnePerTick()
    await one_per_tick.enter()
    first, second, third = (asyncio.create_task(one_per_tick.enter()) for _ in range(3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    assert second.cancelled()
    await one_per_tick.enter()
