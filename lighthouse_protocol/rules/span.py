"""A length of time in the words of a log: 39 ms, 4.1 s, 28 s, 12 min, 3.5 h."""


def span(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
