"""What /proc reports of processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.processes import parse_stat, process_cpu_s, session_usage

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def line(
    pid: int,
    session: int,
    *,
    parent: int = 1,
    own: tuple[int, int] = (0, 0),
    ended: tuple[int, int] = (0, 0),
    pages: int = 0,
) -> str:
    """A line as the kernel writes it, its program's name as hard to read as names can be."""
    before = f"{pid} (a) b (c)) S {parent} {session} {session} 0 -1 4194560 11 12 13 14"
    times = f"{own[0]} {own[1]} {ended[0]} {ended[1]}"
    return f"{before} {times} 20 0 4 0 99 1000000 {pages} 18446744073709551615 1 1 0\n"


def write_processes(proc: Path, *lines: str) -> None:
    for each in lines:
        directory = proc / each.partition(" ")[0]
        directory.mkdir(parents=True)
        (directory / "stat").write_text(each)


def test_a_stat_line_is_read_whatever_the_programs_name_is() -> None:
    stat = parse_stat(line(7, 5, own=(100, 20), ended=(3, 4), pages=250))
    assert (stat.pid, stat.session) == (7, 5)
    assert (stat.own_ticks, stat.ended_ticks, stat.resident_pages) == (120, 7, 250)


@pytest.mark.parametrize("text", ["", "7 bash S 1 5 5", "7 (bash) S 1 5"])
def test_what_is_no_stat_line_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a line of"):
        parse_stat(text)


def test_a_session_is_its_leader_and_all_that_runs_in_it_and_no_other(tmp_path: Path) -> None:
    write_processes(
        tmp_path,
        line(5, 5, own=(100, 20), ended=(3, 4), pages=1000),
        line(6, 5, own=(10, 0), ended=(50, 50), pages=10),
        line(9, 9, own=(7000, 0), ended=(0, 0), pages=5000),
    )
    (tmp_path / "self").mkdir()
    exact_s = {5: 1.2003, 6: 0.1004, 9: 70.0}
    usage = session_usage(5, tmp_path, exact_s.__getitem__)
    assert usage.cpu_s == pytest.approx(1.2003 + 0.1004 + (3 + 4) * _TICK_S)
    assert usage.resident_bytes == 1010 * os.sysconf("SC_PAGE_SIZE")
    assert usage.processes == 2


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(tmp_path: Path) -> None:
    write_processes(tmp_path, line(5, 5, own=(100, 0), ended=(0, 0), pages=1))
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "stat").symlink_to(tmp_path / "gone")
    assert session_usage(5, tmp_path, float).processes == 1


def test_a_process_that_ends_after_it_was_looked_at_counts_by_its_ticks(tmp_path: Path) -> None:
    write_processes(tmp_path, line(5, 5, own=(100, 20), ended=(0, 0), pages=1))

    def gone(pid: int) -> float:
        raise ProcessLookupError(pid)

    assert session_usage(5, tmp_path, gone).cpu_s == pytest.approx(120 * _TICK_S)


def test_the_exact_clock_is_the_processs_own_and_agrees_with_what_it_sees_itself() -> None:
    before_s = time.process_time()
    seen_s = process_cpu_s(os.getpid())
    assert before_s <= seen_s <= time.process_time()


def test_a_real_processes_work_and_its_ended_childs_are_seen() -> None:
    work = "sum(i * i for i in range(2_000_000))"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    program = f"{child}; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        usage = session_usage(process.pid)
        process.communicate(b"\n")
    assert usage.processes == 1
    assert usage.cpu_s >= 5 * _TICK_S
    assert usage.resident_bytes > 1 << 20
