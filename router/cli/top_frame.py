"""One frame of ``warmroute top``, from the router's ``/ui/state``."""

import time
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

State = Mapping[str, Any]

_TIERS: Final = {"gpu": "GPU", "cpu": "CPU RAM", "disk": "disk", "remote": "remote"}
_COLOURS: Final = {
    "gpu": "#f0712f",
    "cpu": "#f2b544",
    "disk": "#3fb8a8",
    "remote": "#7f9ef0",
    "computed": "#6b645c",
}
_STATES: Final = {"up": "green", "down": "red", "draining": "yellow"}
_PHASES: Final = ("queued", "fetching", "prefilling", "decoding")
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_METER_CELLS: Final = 6
_SPLIT_CELLS: Final = 16
_SPARK_CELLS: Final = 60
_SHOWN: Final = 10
"""Requests shown if the height is not limited."""
_LEAST_SHOWN: Final = 3


def frame(
    state: State, url: str, *, lines: int | None = None, problem: str | None = None
) -> RenderableType:
    """Return a router's state as what a console prints, ``lines`` high at most.

    ``problem`` is why the state is an old one, if it is.
    """
    parts: list[RenderableType] = [
        _head(state, url, problem),
        _totals(state),
        Text(),
        _fleet(state["replicas"]),
        Text(),
        *_ttfts(state),
        Text(),
    ]
    left = _SHOWN
    if lines is not None:
        used = 9 + len(state["replicas"])
        left = max(_LEAST_SHOWN, lines - used)
    return Group(*parts, _requests(state["requests"][:left]))


def _head(state: State, url: str, problem: str | None) -> Text:
    up = sum(each["state"] == "up" for each in state["replicas"])
    summary = (
        f"  {url}   {up} of {len(state['replicas'])} replicas up, policy {state['policy']}, "
        f"running for {_lasting(state['now'] - state['started'])}   {_clock(state['now'])}"
    )
    head = Text.assemble(("warmroute", "bold"), (summary, "dim"))
    if problem is not None:
        head.append(f"\n{problem}", "bold red")
    return head


def _totals(state: State) -> Text:
    totals, sessions = state["totals"], state["sessions"]
    waiting = f", {totals['waiting']} held" if totals["waiting"] else ""
    turns = sessions["turns"]
    spilled = f", {_percent(sessions['spills'] / turns)} spilled" if turns else ""
    figures = [
        (f"{totals['requests_per_s']:.1f}", " req/s", ""),
        (_percent(totals["warmth"]), " matched", ""),
        (_median(totals["warm"]), " TTFT warm", _COLOURS["gpu"]),
        (_median(totals["cold"]), " cold", _COLOURS["remote"]),
        (_median(totals["tpot"]), " TPOT", ""),
        (f"{totals['in_flight']}", f" in flight{waiting}", ""),
        (f"{sessions['count']:,}", f" sessions{spilled}", ""),
    ]
    line = Text()
    for figure, text, colour in figures:
        line.append("   " if line else "")
        line.append(figure, f"bold {colour}").append(text, "dim")
    return line


def _fleet(replicas: Sequence[State]) -> Table:
    table = _table("replica", "state")
    for phase in _PHASES:
        table.add_column(phase, justify="right")
    for name in _TIERS.values():
        table.add_column(name)
    table.add_column("warm", justify="right")
    table.add_column("homes", justify="right")
    for each in replicas:
        table.add_row(
            Text(_clean(each["id"]), "bold", overflow="ellipsis", no_wrap=True),
            Text(each["state"], f"not dim {_STATES.get(each['state'], '')}"),
            *(_number(each[phase]) for phase in _PHASES),
            *(_meter(each, tier) for tier in _TIERS),
            Text(_percent(each["warmth"])),
            _number(each["homes"]),
            style="dim" if each["state"] == "down" else "",
        )
    return table


def _meter(replica: State, tier: str) -> Text:
    held = replica["tiers"][tier]
    if held["full"] is not None:
        filled = round(held["full"] * _METER_CELLS)
        return Text.assemble(
            ("━" * filled, _COLOURS[tier]),
            ("━" * (_METER_CELLS - filled), "grey27"),
            f" {_percent(held['full']):>4}",
        )
    if held["keys"]:
        return Text(_short(held["keys"]))
    believed = replica["believed_keys"] if tier == "gpu" else 0
    return Text(f"~{_short(believed)}" if believed else "-", "dim")


def _ttfts(state: State) -> Sequence[Text]:
    """Return a line of medians over time for cold, and one for warm, on one logarithmic scale."""
    slice_s = state["ttft"]["slice_s"]
    by_age: dict[int, State] = {
        round((state["now"] - each["began"]) // slice_s): each for each in state["ttft"]["slices"]
    }
    oldest = min(_SPARK_CELLS - 1, max(by_age, default=0))
    medians = {
        kind: [_p50(by_age.get(age), kind) for age in range(oldest, -1, -1)]
        for kind in ("cold", "warm")
    }
    known = [each for line in medians.values() for each in line if each]
    scale = _scale(min(known), max(known)) if known else (lambda _: " ")
    caption = f"   medians of {slice_s:.0f} s, last {_lasting((oldest + 1) * slice_s)}"
    named = {"cold": _COLOURS["remote"], "warm": _COLOURS["gpu"]}
    return [
        Text.assemble(
            (f"TTFT {kind}  ", "dim"),
            ("".join(scale(each) if each else " " for each in medians[kind]), colour),
            (f"  {_seconds(_last(medians[kind])):>7}", "bold"),
            (caption if kind == "cold" else "", "dim"),
        )
        for kind, colour in named.items()
    ]


def _scale(least_s: float, most_s: float) -> Callable[[float], str]:
    reach = log(most_s / least_s) or 1.0
    return lambda s: _SPARKS[round(log(s / least_s) / reach * (len(_SPARKS) - 1))]


def _p50(stats: State | None, kind: str) -> float | None:
    return None if stats is None or stats[kind] is None else stats[kind]["p50_s"]


def _last(medians: Sequence[float | None]) -> float | None:
    return next((each for each in reversed(medians) if each), None)


def _requests(requests: Sequence[State]) -> RenderableType:
    if not requests:
        return Text("No request has ended yet.", "dim")
    table = _table("ended", "replica", "why")
    table.add_column("prompt", justify="right")
    table.add_column(Text.assemble(*_legend()))
    for name in ("predicted", "TTFT", "TPOT", "status"):
        table.add_column(name, justify="right")
    for each in requests:
        table.add_row(*_request(each))
    return table


def _request(request: State) -> Sequence[Text]:
    status, outcome = request["status"], request["outcome"]
    is_ok = outcome == "ok" and status is not None and status < 400
    ending = status if outcome == "ok" else outcome if status is None else f"{status} {outcome}"
    spilled = request["reason"] == "session-spill" and request["home"]
    why = f"{request['reason'] or '-'}{f' from {spilled}' if spilled else ''}"
    return [
        Text(_clock(request["ended"]), "dim"),
        Text(_clean(request["replica"] or "none"), overflow="ellipsis", no_wrap=True),
        Text(_clean(why), "dim", overflow="ellipsis", no_wrap=True),
        Text(f"{request['prompt_tokens']:,}" if request["prompt_tokens"] else "-"),
        _split(request),
        Text(_seconds(request["predicted_s"]), "dim"),
        Text(_seconds(request["ttft_s"]), "" if request["streamed"] else "dim"),
        Text(_seconds(request["tpot_s"])),
        Text(str(ending), "" if is_ok else "bold red"),
    ]


def _legend() -> Sequence[tuple[str, str]]:
    """Return the tiers' names in their colours; what has none of them was computed."""
    return [(f"{name} ", f"not dim {_COLOURS[name]}") for name in _TIERS]


def _split(request: State) -> Text:
    """Return a prompt's tokens by tier as a bar."""
    whole, bar, matched, filled = request["prompt_tokens"], Text(), 0, 0
    if not whole:
        return bar
    for tier in _TIERS:
        matched += request["matched_tokens"][tier]
        until = round(min(1.0, matched / whole) * _SPLIT_CELLS)
        bar.append("━" * (until - filled), _COLOURS[tier])
        filled = until
    bar.append("━" * (_SPLIT_CELLS - filled), _COLOURS["computed"])
    return bar.append(f" {_percent(min(1.0, matched / whole)):>4}")


def _table(*left: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    return table


def _number(value: int) -> Text:
    return Text(f"{value:,}", "bold" if value else "dim")


def _median(times: State | None) -> str:
    return _seconds(None if times is None else times["p50_s"])


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    if 0 < share < 0.01:
        return "<1%"
    return f"{min(99, round(share * 100)) if share < 1 else 100}%"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _short(value: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{name}"
    return str(value)


def _lasting(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _clean(text: str) -> str:
    """Return a text that no terminal takes for a command: names come from replicas, too."""
    return "".join(each if each.isprintable() else "�" for each in text)
