"""The summary of a run's records: at most 60 lines of at most 160 characters, with public figures to compare with."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from .supervisor import Record

MOST_LINES = 60
MOST_ERRORS = 8
WIDTH = 160
GOALS = {"sft": 1.2, "dpo": 1.6, "kto": 1.6, "kd": 1.5, "opd": 1.5}
"""Method -> tokens per second relative to TRL that we aim for."""
PUBLIC_HEAD = {"full logits": (59, 19.9), "TRL": (167, 13.1), "Liger": (192, 6.1), "products": (42, None)}
"""Implementation -> published milliseconds and peak GiB on an H100 at hidden size 4,096."""
PUBLIC_LORA = {"qwen3-0.6b": 62_000, "qwen3-1.7b": 37_500, "qwen3-4b": 17_500, "qwen3-8b": 11_600}
"""Shape -> the highest published tokens per second of LoRA on an H100."""
PUBLIC_MEMORY = {"sft": 8.87, "dpo": 12.00, "kto": 11.98}
"""Method -> TRL's published peak GiB for Gemma 3 1B with rows of 8,192 tokens."""


def render(records: Sequence[Record]) -> str:
    """Return the summary. The machine, wrong results and what is missing come first, so that nothing hides them."""
    lines: list[str] = []
    for section in SECTIONS:
        try:
            lines += section(records)
        except Exception as error:  # a killed part leaves incomplete records, and the other sections still matter
            lines.append(f"FAILED to summarise {section.__name__}: {type(error).__name__}: {error}")
    return "\n".join(line[:WIDTH] for line in lines[:MOST_LINES])


def failed(record: Record) -> bool:
    """Return whether a measurement failed or computed something wrong."""
    return "error" in record or record.get("right") is False


def select(records: Sequence[Record], part: str, *names: str, **values: Any) -> list[Record]:
    """Return the measurements of a part that did not fail, have these names, and have these values."""
    found = [record for record in records if record["part"] == part and not failed(record)]
    found = [record for record in found if "left_out" not in record and "limit" not in record]
    found = [record for record in found if all(name in record for name in names)]
    return [record for record in found if all(record.get(name) == value for name, value in values.items())]


def show(value: float | None, digits: int = 1) -> str:
    """Return a number for a table; `-` where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def show_memory(row: Record) -> str:
    """Return peak memory, and the part of it that the measurement added."""
    if row["peak_gib"] is None:
        return "memory not measured"
    return f"peak {row['peak_gib']:.2f} GiB, {row['added_gib']:.2f} of it added"


# ---- sections


def machine(records: Sequence[Record]) -> Iterator[str]:
    """The device and versions."""
    found: Record = {name: value for row in select(records, "-", case="machine") for name, value in row.items()}
    versions = found.get("versions") or {}
    shown = [name for name in ("torch", "triton", "transformers", "trl", "liger-kernel") if versions.get(name)]
    names = ", ".join(f"{name} {versions[name]}" for name in shown)
    device = f"{found['name']}, {found['memory_gib']:.0f} GiB" if "name" in found else "no GPU was recorded"
    rehearsal = "REHEARSAL with tiny models, whose figures mean nothing: " * bool(found.get("tiny"))
    yield f"{rehearsal}{device}, {names}{found.get('date', '') and ', ' + found['date']}"


def problems(records: Sequence[Record]) -> Iterator[str]:
    """Failures."""
    wrong = [record for record in records if failed(record)]
    for record in wrong[:MOST_ERRORS]:
        details = {name: value for name, value in record.items() if name not in ("part", "case")}
        yield f"FAILED {record['part']} {record['case']}: {record.get('error') or details}"
    if len(wrong) > MOST_ERRORS:
        yield f"FAILED: {len(wrong) - MOST_ERRORS} more, listed in records.jsonl"


def missing(records: Sequence[Record]) -> Iterator[str]:
    """Measurements that were planned, and for which no time was left or before which the run ended."""
    for plan in (record["planned"] for record in records if record["case"] == "plan"):
        left_out = []
        for part, cases in plan.items():
            rows = [record for record in records if record["part"] == part]
            done = {record["case"] for record in rows if "left_out" not in record}
            names = [case for case in cases if case not in done]
            if names:
                left_out.append(f"{part} {'all' if len(names) == len(cases) else ', '.join(names)}")
        if left_out:
            yield f"not measured, or not to the end: {'; '.join(left_out)}"


def ceilings(records: Sequence[Record]) -> Iterator[str]:
    """Part a."""
    found = select(records, "a")
    if not found:
        return
    rates = {record["dtype"]: record["matmul_tflop_per_s"] for record in found if "matmul_tflop_per_s" in record}
    products = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
    copies = [record["copy_tb_per_s"] for record in found if "copy_tb_per_s" in record]
    yield f"a  copy {show(max(copies, default=None), 2)} TB/s; matrix products in TFLOP/s: {products}"
    for case in ("layouts", "head"):
        checked = [record for record in found if record["case"] == case]
        errors = [value for record in checked for value in record.values() if isinstance(value, float)]
        if checked:
            yield f"a  {case}: {len(checked)} checks right, largest relative error {max(errors):.1e}"
    forms = {record["form"]: record["ms"] for record in found if "form" in record}
    if forms:
        attention = ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in forms.items())
        yield f"a  attention of 8 pairs, ms: {attention}"
    for record in select(records, "a", "ratio"):
        yield f"a  a token of varied shapes costs {record['ratio']:.2f}x of one of repeated shapes"
    tiles = select(records, "a", "ms", case="tiles")
    for by in sorted({record["by"] for record in tiles}):
        row = [f"{r['rows']}{'*' * r['default']}: {r['ms']:.1f}" for r in tiles if r["by"] == by]
        yield f"a  head of {tiles[0]['tokens']:,} tokens by {by}, ms by rows of a tile (* default): {', '.join(row)}"


def compare(records: Sequence[Record]) -> Iterator[str]:
    """Part b."""
    for method, goal in GOALS.items():
        ours, theirs = (select(records, "b", method=method, side=side) for side in ("ours", "trl"))
        tokens = {row["tokens"] for row in ours + theirs}
        if len(tokens) > 1 and method != "opd":  # whose rollouts are sampled
            yield f"FAILED b {method}: the sides train different numbers of tokens: {sorted(tokens)}"
        sides = [f"{name} {medians(rows)}" for name, rows in (("ours", ours), ("TRL", theirs)) if rows]
        if ours and theirs:
            # the sides sample rollouts of other lengths, and the longest one of a batch takes the time
            unit = "rows_per_second" if method == "opd" else "tokens_per_second"
            ratio, memory = (
                median(row[name] for row in ours) / median(row[name] for row in theirs) for name in (unit, "peak_gib")
            )
            sides.append(f"{ratio:.2f}x{' by rows' * (method == 'opd')} (goal {goal}), memory {memory:.2f}x")
        if sides:
            yield f"b  {method:4s} {' | '.join(sides)}"


def medians(rows: Sequence[Record]) -> str:
    """Return the medians of some runs: rate, utilisation and peak memory."""
    rate, peak = (median(row[name] for row in rows) for name in ("tokens_per_second", "peak_gib"))
    utilisation = [row["mfu"] for row in rows if row["mfu"]]
    mfu = f", MFU {100 * median(utilisation):.0f} %" if utilisation else ""
    return f"{rate:,.0f} trained tokens/s{mfu}, {peak:.1f} GiB ({len(rows)} run{'s' * (len(rows) > 1)})"


def lm_head(records: Sequence[Record]) -> Iterator[str]:
    """Part c."""
    found = select(records, "c")
    for size in sorted({record["hidden_size"] for record in found}):
        rows = {record["by"]: record for record in found if record["hidden_size"] == size}
        least = rows.get("products", {}).get("ms")
        for by, row in rows.items():
            ratio = f", {row['ms'] / least:.2f}x of the products" if least else ""
            milliseconds, gib = PUBLIC_HEAD.get(by, (None, None)) if size == 4096 else (None, None)
            public = f"; published {milliseconds} ms, {show(gib)} GiB" if milliseconds else ""
            yield f"c  H={size} {by:15s} {row['ms']:7.1f} ms{ratio}, {show_memory(row)}{public}"


def lora(records: Sequence[Record]) -> Iterator[str]:
    """Part d."""
    for row in select(records, "d", "tokens_per_second"):
        mfu = f", MFU {100 * row['mfu']:.0f} %" if row["mfu"] else ""
        rate = f"{row['tokens_per_second']:,.0f} tokens/s{mfu}, peak {row['peak_gib']:.1f} GiB"
        public = f"; published {PUBLIC_LORA[row['case']]:,} tokens/s" if row["case"] in PUBLIC_LORA else ""
        yield f"d  {row['case'] if 'full' in row['case'] else 'LoRA ' + row['case']}: {rate}{public}"


def generation(records: Sequence[Record]) -> Iterator[str]:
    """Part f."""
    found = select(records, "f", "tokens_per_second")
    for rows in sorted({record["rows"] for record in found}):
        rates = {record["by"]: record for record in found if record["rows"] == rows}
        sides = [
            f"{by} {row['tokens_per_second']:,.0f} tokens/s, {row['ms_per_step']:.1f} ms per token, {show_memory(row)}"
            for by, row in rates.items()
        ]
        yield f"f  {rows:3d} rows: {' | '.join(sides)}"


def acceleration(records: Sequence[Record]) -> Iterator[str]:
    """Part e."""
    for row in select(records, "e", "tokens_per_second"):
        rate = f"{row['tokens_per_second']:,.0f} trained tokens/s, peak {row['peak_gib']:.1f} GiB"
        yield f"e  {row['case']:18s} {rate}, first step {row['first_step_seconds']:.1f} s"


def long_rows(records: Sequence[Record]) -> Iterator[str]:
    """Part g."""
    for row in select(records, "g", "method"):
        yield f"g  {row['case']}: peak {row['peak_gib']:.2f} GiB; TRL published {PUBLIC_MEMORY[row['method']]:.2f} GiB"
    for row in select(records, "g", "length", "ms"):
        rate = f"{row['ms']:.0f} ms, {row['tokens_per_second']:,.0f} tokens/s"
        yield f"g  a row of {row['length']:,} tokens: {rate}, {show_memory(row)}"


def profiles(records: Sequence[Record]) -> Iterator[str]:
    """Part h."""
    for row in select(records, "h", "operations"):
        counts = f"{row['launches']} launches, {row['waits']} waits, {row['reads']} reads of a value"
        yield f"h  {row['method']}: step {row['step_ms']:.0f} ms, {row['device_ms']:.0f} ms on the device; {counts}"
        top = ", ".join(f"{name[:34]} {milliseconds:.1f}" for name, milliseconds, _ in row["operations"][:4])
        yield f"h  {row['method']}: most expensive, ms: {top}"


def seconds(records: Sequence[Record]) -> Iterator[str]:
    """The time that each part took."""
    found = [f"{r['part']} {r['seconds']:.0f}/{r['limit']:.0f}" for r in records if r["case"] == "part"]
    if found:
        yield f"seconds of each part and its limit: {', '.join(found)}"


SECTIONS = (
    machine,
    problems,
    missing,
    ceilings,
    compare,
    lm_head,
    lora,
    generation,
    acceleration,
    long_rows,
    profiles,
    seconds,
)
