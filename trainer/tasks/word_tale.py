"""A word problem in the making: the draws it is made of, its sentences, and the program that computes its answer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sparkgrpo.trainer.tasks.base import KeyedDraws

MAX_STEPS = 4
NAMES = (
    *("Amara", "Bruno", "Chidi", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ingrid", "Jamal", "Keiko", "Lorenzo"),
    *("Maren", "Nadia", "Otis", "Priya", "Quentin", "Rosa", "Sanjay", "Tove", "Ulrich", "Vera", "Wanda", "Yusuf"),
)
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
}


@dataclass(kw_only=True, slots=True)
class Tale:
    """A problem in the making."""

    draws: KeyedDraws
    num_steps: int
    """How many steps the program takes, 1 to 4."""
    value: int = 0
    """The value so far."""
    sentences: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    """The worked solution, a line a step."""

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + self.draws.below(high - low + 1)

    def pick(self, *choices: str) -> str:
        """One of the choices."""
        return choices[self.draws.below(len(choices))]

    def two_names(self) -> tuple[str, str]:
        """Two different people."""
        first = self.draws.below(len(NAMES))
        second = (first + 1 + self.draws.below(len(NAMES) - 1)) % len(NAMES)
        return NAMES[first], NAMES[second]

    def say(self, sentence: str) -> None:
        """Add a sentence to the story."""
        self.sentences.append(sentence)

    def start(self, value: int) -> None:
        """Set the value that the first step works on."""
        self.value = value

    def step(self, operation: str, operand: int) -> None:
        """Take one step: value becomes `value operation operand`; a division must come out even."""
        assert operation != "/" or self.value % operand == 0, "a family divides without a rest"
        result = OPERATIONS[operation](self.value, operand)
        self.steps.append(f"{self.value} {operation} {operand} = {result}")
        self.value = result
        assert result > 0, "a family keeps its values above zero"

    @property
    def is_done(self) -> bool:
        """Whether all steps are taken, and the question is due."""
        return len(self.steps) >= self.num_steps

    def part(self, low: int = 1) -> int:
        """A whole number from low to just below the value: what can be taken away."""
        return self.between(min(low, self.value - 1), self.value - 1)


def distractor(tale: Tale) -> str:
    """A sentence with a number that has nothing to do with the question."""
    name, _ = tale.two_names()
    number = tale.between(2, 90)
    sentences: Sequence[str] = (
        f"{name}, who watches all this, has been learning the violin for {number} weeks.",
        f"The road outside was last repaired {number} months ago.",
        f"On the wall hangs a calendar with {number} photographs of owls.",
        f"A radio in the corner plays song number {number} of an endless list.",
        f"Somebody mentions that the tower clock weighs {number} stone.",
        f"It is {number} paces from here to the well.",
    )
    return tale.pick(*sentences)
