"""How noxfile.py says what a session installs before it begins, and which sessions are a single command."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import nox

from tools import environments
from tools.packages import group

Command = Callable[[nox.Session], None]


def over(*packages: str, **installed: Any) -> Callable[[Callable[..., None]], object]:
    """A session that begins with `environments.install(session, *packages, **installed)`."""

    def decorate(body: Callable[..., None]) -> object:
        @functools.wraps(body)
        def run(session: nox.Session, **parameters: str) -> None:
            environments.install(session, *packages, **installed)
            body(session, **parameters)

        return nox.session(run)

    return decorate


def pytest(session: nox.Session, *arguments: str, timeout_s: int = 300, env: dict[str, str] | None = None) -> None:
    session.run("python", "-m", "pytest", "-q", f"--timeout={timeout_s}", *arguments, env=env)


@dataclass(frozen=True)
class Claim:
    """A session of one command, by its name and what it proves or makes; the session's arguments go to the command."""

    name: str
    says: str

    def by_tests(self, *arguments: str, over: str = "", installs: Command | None = None, **installed: Any) -> None:
        """pytest, over core and these packages, or over what `installs` installs."""

        def run(session: nox.Session) -> None:
            if installs is None:
                environments.install(session, *over.split(), **installed)
            else:
                installs(session)
            pytest(session, *arguments, *session.posargs)

        self.by(run)

    def by_script(self, *command: str, over: str, **installed: Any) -> None:
        """A script in Python, over core and these packages."""

        def run(session: nox.Session) -> None:
            environments.install(session, *over.split(), **installed)
            session.run("python", *command, *session.posargs)

        self.by(run)

    def by_tool(self, script: str, needs: str) -> None:
        """A script in Python that needs one dependency group, and nothing of ours."""

        def run(session: nox.Session) -> None:
            session.install("-q", *group(needs))
            session.run("python", script, *session.posargs)

        self.by(run)

    def by(self, run: Command) -> None:
        """A function of tools/."""

        def claimed(session: nox.Session) -> None:
            run(session)

        claimed.__doc__ = self.says
        nox.session(claimed, name=self.name)
