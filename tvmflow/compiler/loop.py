"""How the importer describes a loop to the passes: as an attribute of the function of the loop."""

import json
from dataclasses import asdict, dataclass

# The attribute: a loop's description as text.
LOOP = "tvmflow.loop"


@dataclass(frozen=True)
class LoopDescription:
    """What the functions of a loop take and return.

    The function `step` computes an iteration from its number, the carried values and values of the graphs around the
    loop; it returns the next number, whether there is another iteration, the carried values and the rows of the stacks.
    `part` is the function that calls `step`, and the loop's function calls `part`; it returns the carried values and
    the stacks. In all three, `index` is the name of the parameter for the number, and `carried` are those for the
    carried values; TVM removes parameters that are not read.

    The number of iterations of a loop that `is_counted` is a size that is known before it begins. A stack is written
    from its end where it `is_reversed`; its rows have any length where it `is_joined`.
    """

    step: str
    part: str
    index: str
    carried: tuple[str, ...]
    is_counted: bool
    is_reversed: tuple[bool, ...]
    is_joined: tuple[bool, ...]

    def text(self) -> str:
        """Return the description as the attribute `LOOP` has it."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "LoopDescription":
        """Return the description that `text` returned."""
        fields = json.loads(text)
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("carried", "is_reversed", "is_joined")}})
