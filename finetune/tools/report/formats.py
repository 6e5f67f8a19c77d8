"""Numbers and durations as a reader wants them."""

from finetune.tools.report.read import number


def text_of(value: object) -> str:
    """Return a value for readers: numbers with four significant digits, a dash for nothing."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e7):
            return f"{value:.3g}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def duration(seconds: float | None) -> str:
    """Return seconds as hours, minutes and seconds."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def percent(value: object) -> str | None:
    """Return a fraction in percent with two decimals, without the sign."""
    fraction = number(value)
    return None if fraction is None else f"{100 * fraction:.2f}"


def change(now: object, before: object) -> str | None:
    """Return the relative change; None where there is nothing to compare with."""
    new, old = number(now), number(before)
    return f"{100 * (new - old) / old:+.0f} %".replace("-", "−") if new is not None and old else None


def speed(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def gib(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} GiB"


def hours(value: object) -> str:
    time = number(value)
    return "–" if time is None else f"{time:,.2f} h" if time < 100 else f"{time:,.0f} h"


def millions(value: object) -> str:
    count = number(value)
    return "–" if count is None else f"{count / 1e6:,.1f} M"
