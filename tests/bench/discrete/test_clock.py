"""The event loop whose time is the model's."""

import asyncio

import pytest

from replay import clock


def test_time_begins_at_zero_and_jumps_from_timer_to_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen = [("begin", loop.time())]

        async def sleeper(name: str, wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            seen.append((name, loop.time()))

        await asyncio.gather(sleeper("late", 7.5), sleeper("early", 0.25), sleeper("mid", 3.0))
        return seen

    assert clock.run(main()) == [("begin", 0.0), ("early", 0.25), ("mid", 3.0), ("late", 7.5)]


def test_a_month_is_not_waited_for() -> None:
    async def main() -> float:
        await asyncio.sleep(2.5e6)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 2.5e6


def test_a_year_is_too_long_to_be_exact() -> None:
    with pytest.raises(OverflowError, match="model time"):
        clock.run(asyncio.sleep(3e7))


def test_what_is_due_at_a_time_is_done_before_what_is_due_after_it() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        done: list[int] = []
        for number in (3, 1, 2):
            loop.call_at(0.1 * number, done.append, number)
        await asyncio.sleep(1.0)
        return done

    assert clock.run(main()) == [1, 2, 3]


def test_no_time_passes_while_something_can_be_done() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(1e-6, lambda: None)
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert clock.run(main()) == 0.0


def test_a_timeout_ends_a_wait_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 2.5


def test_who_waits_for_nothing_is_stuck_and_is_ended_all_the_same() -> None:
    ended = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("main")

    with pytest.raises(clock.StuckError, match="no timer"):
        clock.run(main())
    assert ended == ["main"]


def test_tasks_that_are_left_are_cancelled() -> None:
    ended = []

    async def forever(name: str) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(name)

    async def main() -> str:
        tasks = [asyncio.create_task(forever(name)) for name in "ab"]
        await asyncio.sleep(0.5)
        return f"{len(tasks)} tasks run"

    assert clock.run(main()) == "2 tasks run"
    assert sorted(ended) == ["a", "b"]


def test_what_is_raised_is_passed_on_and_tasks_end_then_too() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("task")

    async def main() -> None:
        task = asyncio.create_task(forever())
        await asyncio.sleep(1.0)
        assert not task.done()
        raise ValueError("as it happens")

    with pytest.raises(ValueError, match="as it happens"):
        clock.run(main())
    assert ended == ["task"]


def test_each_run_begins_anew() -> None:
    async def main() -> float:
        await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert [clock.run(main()) for _ in range(2)] == [1.0, 1.0]
