"""Numbers as a person reads them."""


def format_number(value: float) -> str:
    """Return a number with four significant digits; from 10,000 on, as a whole number with commas."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
