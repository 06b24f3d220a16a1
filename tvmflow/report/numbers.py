"""Numbers as a person reads them."""


def format_number(value: float) -> str:
    """Return a number with four significant digits, and a large one in full with its thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
