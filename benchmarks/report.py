"""The results as tables: for the terminal, and as Markdown for the README."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.goals import goals
from benchmarks.results import Results, Row, StepPart, StepProfile

_NOTHING = "–"


@dataclass(frozen=True, slots=True)
class TextTable:
    """The first column is text, the others are figures."""

    title: str
    headings: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] + ["---:"] * (len(self.headings) - 1), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(cells)} |" for cells in lines)])

    def rich(self) -> Table:
        table = Table(title=self.title, box=SIMPLE)
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=heading == "engine")
        for cells in self.rows:
            table.add_row(*cells)
        return table


def all_tables(results: Results) -> list[TextTable]:
    concurrencies = sorted({row.concurrency for row in results.rows})
    tables = [_limits(results), *(_engines(results, streams) for streams in concurrencies), _starts(results)]
    tables += [*_profiles(results), _goals(results)]
    return [*tables, _missing(results)] if results.missing else tables


def print_report(results: Results, console: Console) -> None:
    for table in all_tables(results):
        console.print(table.rich())


def markdown_report(results: Results) -> str:
    return "\n\n".join([_headline(results), *(table.markdown() for table in all_tables(results))]) + "\n"


def _headline(results: Results) -> str:
    machine = results.machine
    num_rounds = max((len(row.runs) for row in results.rows), default=0)
    return (
        f"{machine.processor}, {machine.num_cores} cores ({results.limits.num_threads} threads), "
        f"{machine.instruction_set}{' with bfloat16' if machine.has_bfloat16 else ''}, "
        f"{machine.memory_bytes / 2**30:.0f} GiB; {results.date}, commit {results.commit}. "
        f"{results.prompt_len} tokens in, {results.max_tokens} out, greedy; medians of {num_rounds} rounds."
    )


def _limits(results: Results) -> TextTable:
    limits = results.limits
    return TextTable(
        "The machine's limits",
        ["", "measured"],
        [
            ["reading memory, one thread", f"{limits.bandwidth_one_thread / 1e9:.1f} GB/s"],
            [f"reading memory, {limits.num_threads} threads", f"{limits.bandwidth / 1e9:.1f} GB/s"],
            *(
                [f"matrix products, {name}", f"{rate / 1e9:.3g} G{unit}/s" if rate else _NOTHING]
                for name, rate, unit in (
                    ("float32", limits.float32, "FLOP"),
                    ("bfloat16", limits.bfloat16, "FLOP"),
                    ("int8", limits.int8, "OP"),
                )
            ),
        ],
    )


def _engines(results: Results, concurrency: int) -> TextTable:
    headings = ["engine", "tokens per s", "ours ÷ it", "first token, ms", "step, ms"]
    headings += ["memory ÷ step", "limit ÷ step", "device idle"]
    rows = [list(_engine_cells(results, row)) for row in results.rows if row.concurrency == concurrency]
    return TextTable(f"{concurrency} {'stream' if concurrency == 1 else 'streams'}", headings, rows)


def _engine_cells(results: Results, row: Row) -> Iterator[str]:
    facts = next(engine for engine in results.engines if engine.name == row.engine)
    ours = results.row("deepinfer", facts.weights, row.concurrency)
    yield row.engine
    yield f"{row.tokens_per_s:.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.1f}"
    yield _NOTHING if ours is None or ours is row else f"{ours.speedup_over(row):.2f}"
    yield f"{1e3 * row.first_token_s:.0f}"
    yield f"{1e3 * row.step_s:.1f}"
    yield f"{row.share_of_memory_limit:.2f}"
    yield f"{row.share_of_limit:.2f}"
    yield _NOTHING if row.device_idle_share is None else f"{row.device_idle_share:.1%}"


def _starts(results: Results) -> TextTable:
    rows = [[engine.name, engine.version, f"{engine.start_s:.1f}"] for engine in results.engines]
    return TextTable("Versions, and the start of each process", ["engine", "version", "until its first token, s"], rows)


def _profiles(results: Results) -> Iterator[TextTable]:
    for weights in dict.fromkeys(profile.weights for profile in results.profiles):
        profiles = [profile for profile in results.profiles if profile.weights == weights]
        headings = ["part of a step"]
        rows = [[part.name] for part in profiles[0].parts]
        rows += [["sum of these"], ["the same step in one call"], ["a step of the engine"]]
        for profile in profiles:
            headings += [f"{profile.concurrency}: ms", "memory", "products"]
            row = results.row("deepinfer", weights, profile.concurrency)
            sum_s = sum(part.seconds for part in profile.parts)
            for cells, part in zip(rows, profile.parts, strict=False):
                cells += [_milliseconds(part.seconds), *_shares_of_limits(profile, part)]
            for cells, seconds in zip(rows[-3:], (sum_s, profile.whole_s, row.step_s if row else None), strict=True):
                cells += [_NOTHING if seconds is None else _milliseconds(seconds), _NOTHING, _NOTHING]
        title = f"Where a decode step of ours goes, {weights}: bytes/s and operations/s as shares of the limits"
        yield TextTable(title, headings, rows)


def _shares_of_limits(profile: StepProfile, part: StepPart) -> Iterator[str]:
    for least_s in (part.cost.memory_s(profile.bandwidth), part.cost.num_operations / profile.operations_per_s):
        yield f"{least_s / part.seconds:.2f}" if least_s and part.seconds else _NOTHING


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds >= 0.1 else f"{1e3 * seconds:#.3g}"


def _goals(results: Results) -> TextTable:
    words = {None: "not measured", True: "yes", False: "no"}
    rows = [
        [
            goal.what,
            f"{'≥' if goal.at_least else '≤'} {goal.goal:g}",
            _NOTHING if goal.reached is None else f"{goal.reached:.3g}",
            words[goal.is_met],
        ]
        for goal in goals(results)
    ]
    return TextTable(
        f"Goals, {results.prompt_len} tokens in, {results.max_tokens} out", ["", "goal", "reached", "met"], rows
    )


def _missing(results: Results) -> TextTable:
    # The first line: the rest is the end of a log.
    rows = [[name, reason.splitlines()[0].replace("|", "\\|")] for name, reason in results.missing.items()]
    return TextTable("Not measured here", ["engine", "why"], rows)
