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
    """Return the summary. Wrong results, errors and what was left out come first, so that nothing hides them."""
    lines = [*problems(records)]
    for section in (ceilings, methods, lm_head, lora, generation, acceleration, long_rows, profiles, seconds):
        try:
            lines += section(records)
        except Exception as error:  # a killed part leaves incomplete records, and the other sections still matter
            lines.append(f"FAILED to summarise {section.__name__}: {type(error).__name__}: {error}")
    return "\n".join(line[:WIDTH] for line in lines[:MOST_LINES])


def failed(record: Record) -> bool:
    """Return whether a measurement failed or computed something wrong."""
    return "error" in record or record.get("right") is False


def of(records: Sequence[Record], part: str, **values: Any) -> list[Record]:
    """Return the measurements of a part that did not fail and have these values."""
    measured = [record for record in records if record["part"] == part and "limit" not in record]
    found = [record for record in measured if not failed(record) and "left_out" not in record]
    return [record for record in found if all(record.get(name) == value for name, value in values.items())]


def number(value: float | None, digits: int = 1) -> str:
    """Return a number for a table; `-` where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


# ---- sections


def problems(records: Sequence[Record]) -> Iterator[str]:
    """Failures, and measurements for which no time was left."""
    wrong = [record for record in records if failed(record)]
    for record in wrong[:MOST_ERRORS]:
        details = {name: value for name, value in record.items() if name not in ("part", "case")}
        yield f"FAILED {record['part']} {record['case']}: {record.get('error') or details}"
    if len(wrong) > MOST_ERRORS:
        yield f"FAILED: {len(wrong) - MOST_ERRORS} more, listed in records.jsonl"
    left_out = [f"{record['part']} {record['case']}" for record in records if "left_out" in record]
    if left_out:
        yield f"left out for lack of time: {', '.join(left_out)}"


def ceilings(records: Sequence[Record]) -> Iterator[str]:
    """Part a."""
    found = of(records, "a")
    if not found:
        return
    device: Record = {name: value for record in found if record["case"] == "device" for name, value in record.items()}
    if device.get("tiny"):
        yield "a  REHEARSAL with tiny models: the figures mean nothing"
    rates = {record["dtype"]: record["matmul_tflop_per_s"] for record in found if "matmul_tflop_per_s" in record}
    versions = device.get("versions") or {}
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if versions.get(name))
    yield f"a  {device.get('name', 'CPU')}, {number(device.get('memory_gib'), 0)} GiB, {names}"
    products = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
    yield f"a  copy {number(device.get('copy_tb_per_s'), 2)} TB/s; products in TFLOP/s: {products}"
    for case in ("layouts", "head"):
        checked = [record for record in found if record["case"] == case]
        errors = [value for record in checked for value in record.values() if isinstance(value, float)]
        if checked:
            yield f"a  {case}: {len(checked)} checks right, largest relative error {max(errors):.1e}"
    forms = {record["form"]: record["ms"] for record in found if "form" in record}
    shapes = [record["ratio"] for record in found if record["case"] == "shapes"]
    attention = ", ".join(f"{name} {milliseconds:.1f}" for name, milliseconds in forms.items())
    yield f"a  attention of 8 pairs, ms: {attention}; varied shapes cost {number(max(shapes, default=None), 2)}x"
    tiles = [record for record in found if record["case"] == "tiles"]
    for by in sorted({record["by"] for record in tiles}):
        row = [f"{r['rows']}{'*' if r['default'] else ''}: {r['ms']:.1f}" for r in tiles if r["by"] == by]
        yield f"a  head of {tiles[0]['tokens']:,} tokens by {by}, ms by rows of a tile (* default): {', '.join(row)}"


def methods(records: Sequence[Record]) -> Iterator[str]:
    """Part b."""
    for method, goal in GOALS.items():
        ours, theirs = (of(records, "b", method=method, side=side) for side in ("ours", "trl"))
        sides = [f"{name} {medians(rows)}" for name, rows in (("ours", ours), ("TRL", theirs)) if rows]
        if ours and theirs:
            ratio, memory = (
                median(row[name] for row in ours) / median(row[name] for row in theirs)
                for name in ("tokens_per_second", "peak_gib")
            )
            sides.append(f"{ratio:.2f}x (goal {goal}), memory {memory:.2f}x")
        if sides:
            yield f"b  {method:4s} {' | '.join(sides)}"


def medians(rows: Sequence[Record]) -> str:
    """Return the medians of some runs: rate, utilisation and peak memory."""
    rate, peak = (median(row[name] for row in rows) for name in ("tokens_per_second", "peak_gib"))
    utilisation = [row["mfu"] for row in rows if row.get("mfu")]  # TRL's runs have none: same work, other rate
    mfu = f", MFU {100 * median(utilisation):.0f} %" if utilisation else ""
    return f"{rate:,.0f} trained tokens/s{mfu}, {peak:.1f} GiB ({len(rows)} runs)"


def lm_head(records: Sequence[Record]) -> Iterator[str]:
    """Part c."""
    found = of(records, "c")
    for size in sorted({record["hidden_size"] for record in found}):
        rows = {record["by"]: record for record in found if record["hidden_size"] == size}
        least = rows.get("products", {}).get("ms")
        for by, row in rows.items():
            ratio = f", {row['ms'] / least:.2f}x of the products" if least else ""
            milliseconds, gib = PUBLIC_HEAD.get(by, (None, None)) if size == 4096 else (None, None)
            public = f"; published {milliseconds} ms, {number(gib)} GiB" if milliseconds else ""
            memory = f"peak {number(row['peak_gib'])} GiB, added {number(row['added_gib'])}"
            yield f"c  H={size} {by:15s} {row['ms']:7.1f} ms{ratio}, {memory}{public}"


def lora(records: Sequence[Record]) -> Iterator[str]:
    """Part d."""
    for row in of(records, "d", right=True):
        public = PUBLIC_LORA.get(row["case"])
        mfu = f", MFU {100 * row['mfu']:.0f} %" if row["mfu"] else ""
        rate = f"{row['tokens_per_second']:,.0f} tokens/s{mfu}, {row['peak_gib']:.1f} GiB"
        yield f"d  LoRA {row['case']}: {rate}; published {public:,}"


def generation(records: Sequence[Record]) -> Iterator[str]:
    """Part f."""
    found = of(records, "f", right=True)
    for rows in sorted({record["rows"] for record in found}):
        rates = {record["by"]: record for record in found if record["rows"] == rows}
        sides = [f"{by} {r['tokens_per_second']:,.0f} tokens/s, {r['ms_per_step']:.1f} ms a step, added "
                 f"{number(r['added_gib'])} GiB" for by, r in rates.items()]  # fmt: skip
        yield f"f  {rows:3d} rows: {' | '.join(sides)}"


def acceleration(records: Sequence[Record]) -> Iterator[str]:
    """Part e."""
    for row in of(records, "e", right=True):
        rate = f"{row['tokens_per_second']:,.0f} trained tokens/s, {row['peak_gib']:.1f} GiB"
        yield f"e  {row['case']:15s} {rate}, first step {row['first_step_seconds']:.1f} s"


def long_rows(records: Sequence[Record]) -> Iterator[str]:
    """Part g."""
    for row in (record for record in of(records, "g") if "method" in record):
        yield f"g  {row['case']}: peak {row['peak_gib']:.2f} GiB; TRL published {PUBLIC_MEMORY[row['method']]:.2f}"
    for row in (record for record in of(records, "g") if "length" in record):
        rate = f"{row['ms']:.0f} ms, {row['tokens_per_second']:,.0f} tokens/s"
        memory = f"peak {number(row['peak_gib'])} GiB, added {number(row['added_gib'])}"
        yield f"g  a row of {row['length']:,} tokens: {rate}, {memory}"


def profiles(records: Sequence[Record]) -> Iterator[str]:
    """Part h."""
    for row in (record for record in of(records, "h") if "operations" in record):
        counts = f"{row['launches']} launches, {row['waits']} waits, {row['reads']} reads of a value"
        yield f"h  {row['method']}: step {row['step_ms']:.0f} ms, of it on the device {row['device_ms']:.0f}; {counts}"
        top = ", ".join(f"{name[:34]} {milliseconds:.1f}" for name, milliseconds, _ in row["operations"][:4])
        yield f"h  {row['method']}: most expensive, ms: {top}"


def seconds(records: Sequence[Record]) -> Iterator[str]:
    """The time that each part took."""
    found = [f"{r['part']} {r['seconds']:.0f}/{r['limit']:.0f}" for r in records if r["case"] == "part"]
    yield f"seconds of each part and its limit: {', '.join(found)}"
