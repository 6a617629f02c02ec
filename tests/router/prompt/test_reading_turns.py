"""Turns of tokenizing: one at a time, short prompts first, none lost."""

import asyncio

from router.prompt.prompt_reader import ReadingTurns


class Readers:
    """Readers that note who has the turn and hold it until they are told."""

    def __init__(self) -> None:
        self.turns = ReadingTurns()
        self.order: list[str] = []
        self.inside = 0
        self.go_on = asyncio.Event()

    def start(self, name: str, chars: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._read(name, chars))

    async def _read(self, name: str, chars: int) -> None:
        async with self.turns.turn(chars):
            self.inside += 1
            assert self.inside == 1
            self.order.append(name)
            try:
                await self.go_on.wait()
            finally:
                self.inside -= 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_at_a_time_and_the_shortest_first() -> None:
    readers = Readers()
    tasks = [readers.start("first", 10**9)]
    await settle()
    tasks += [readers.start("long", 10**9), readers.start("short", 10), readers.start("mid", 10**8)]
    await settle()
    assert readers.order == ["first"]
    readers.go_on.set()
    await asyncio.gather(*tasks)
    assert readers.order == ["first", "short", "mid", "long"]


async def test_equal_ones_keep_their_order() -> None:
    readers = Readers()
    tasks = [readers.start(str(number), 100) for number in range(4)]
    await settle()
    readers.go_on.set()
    await asyncio.gather(*tasks)
    assert readers.order == ["0", "1", "2", "3"]


async def test_who_goes_while_waiting_is_passed_over() -> None:
    readers = Readers()
    first, gone, last = (readers.start(name, 10) for name in ("first", "gone", "last"))
    await settle()
    gone.cancel()
    readers.go_on.set()
    await asyncio.gather(first, last)
    assert readers.order == ["first", "last"]


async def test_a_turn_is_not_lost_with_who_goes_just_as_it_comes() -> None:
    readers = Readers()
    readers.go_on.set()
    async with readers.turns.turn(10):
        gone, last = readers.start("gone", 10), readers.start("last", 10)
        await settle()
    gone.cancel()  # it has been given the turn, and has not seen it yet
    await last
    assert readers.order == ["last"]


async def test_a_reader_that_fails_gives_its_turn_back() -> None:
    turns = ReadingTurns()
    for _ in range(2):
        try:
            async with turns.turn(10):
                raise ValueError
        except ValueError:
            pass
    async with asyncio.timeout(5), turns.turn(10):
        pass
