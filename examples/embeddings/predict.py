"""Ranks sentences by their likeness to a question: `python predict.py BUNDLE QUESTION SENTENCE [SENTENCE ...]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from data import load_tokenizer, tokenize

from tvmflow.errors import TvmflowError
from tvmflow.runtime import load


def rank(model: Any, tokenizer: Any, question: str, sentences: Sequence[str]) -> list[tuple[float, str]]:
    """The sentences with the cosine of their angle to the question, the likest first."""
    (vectors,) = model(**tokenize(tokenizer, [question, *sentences])).values()
    likeness = vectors[1:] @ vectors[0]
    return [(float(likeness[place]), sentences[place]) for place in np.argsort(-likeness, kind="stable")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a mistake of the user ends it with one sentence."""
    parser = argparse.ArgumentParser(description="Print sentences by their likeness to a question.")
    parser.add_argument("bundle", type=Path, help="a bundle of release.yaml")
    parser.add_argument("question", help="what to compare with")
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE", help="what to rank, 31 at most")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path(__file__).parent / "models" / "tokenizer.json", help="tokenizer.json"
    )
    options = parser.parse_args(arguments)
    if not options.tokenizer.is_file():
        raise SystemExit(f"error: there is no tokenizer {options.tokenizer}; run fetch.py, which brings it")
    try:
        with load(options.bundle) as model:
            ranks = rank(model, load_tokenizer(options.tokenizer), options.question, options.sentences)
    except (OSError, TvmflowError) as error:
        raise SystemExit(f"error: {error}") from error
    for likeness, sentence in ranks:
        print(f"{likeness:6.3f}  {sentence}")


if __name__ == "__main__":
    main()
