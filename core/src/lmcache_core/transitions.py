"""State machines as tables: one idiom for all of ours.

A machine is an enum of states, an enum of events, and one table from both to the next state, in a module whose name
ends in `states`. Whatever has a state has one method `move`, which looks each step up there, and no other line changes
the state. Tests walk the table, and the docs show it as it draws itself.
"""

from __future__ import annotations

from enum import Enum
from typing import NoReturn, TypeVar

__all__ = ["Transitions"]

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Transitions(dict[tuple[S, E], S]):
    """(State, event) → the next state. A step that is not in it is a bug of the caller's: `KeyError`, with its name."""

    def __missing__(self, step: tuple[S, E]) -> NoReturn:
        state, event = step
        raise KeyError(f"{type(state).__name__} {state.name} has no step {event.name}")

    def diagram(self) -> str:
        """The table as Mermaid text, for the docs: one line for each pair of states, with all events between them."""
        between: dict[tuple[S, S], list[str]] = {}
        for (before, event), after in self.items():
            between.setdefault((before, after), []).append(event.name.lower().replace("_", " "))
        lines = [
            f"    {before.name} --> {after.name}: {', '.join(events)}" for (before, after), events in between.items()
        ]
        return "\n".join(["stateDiagram-v2", *lines]) + "\n"
